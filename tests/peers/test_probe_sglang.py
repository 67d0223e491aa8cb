"""The probe in SGLang's own classes, imported without CUDA: every method that it hooks is there, with its arguments.

    SOJOURN_SGLANG_PYTHON=.../sglang/bin/python pytest -m peer tests/peers/test_probe_sglang.py

That interpreter's environment has sglang, its Python dependencies and msgspec. No server runs: that takes a GPU.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SOJOURN_SGLANG_PYTHON")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_SGLANG_PYTHON names no interpreter"),
]


def test_every_hook_finds_its_method_in_sglang(tmp_path):
    done = subprocess.run(
        [PYTHON, str(ROOT / "tests" / "probe" / "sglang_classes.py")], capture_output=True, text=True, timeout=500,
        env=os.environ | {"SOJOURN_PROBE": str(tmp_path / "probe"), "PYTHONPATH": str(ROOT / "probe")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["said"] == [] and not any(found["misfits"].values())
    assert found["hooked"] == list(found["misfits"]) and len(found["hooked"]) == 5
    assert found["front"] and "SGLangMiddleware" in found["middleware"]
