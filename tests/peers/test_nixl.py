"""KV transfers over NIXL, with UCX over TCP: SOJOURN_NIXL_PYTHON names the python of an environment that has nixl."""

import os
import subprocess
import sys

import pytest

PYTHON = os.environ.get("SOJOURN_NIXL_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_NIXL_PYTHON names no environment with nixl"),
]

SPLIT = """
import sys
sys.path.append(sys.argv[2])
from tests.engine.techniques.handover.test_disaggregation import Split, alone, requests
nixl = {"kv_transport": "nixl"}
pair = Split(sys.argv[1], prefill=nixl, decode=nixl)
assert pair.serve(requests()) == alone(sys.argv[1])
ended = pair.second.ended["r0"]
assert ended.kv_load.loaded_tokens == {"peer": 80}, ended.kv_load
mixed = Split(sys.argv[1], prefill=nixl)
mixed.serve(requests())
assert "its kv_transport is nixl, and here it is shm" in mixed.second.ended["r0"].error
pair.close(), mixed.close()
print("split over nixl")
"""


@pytest.mark.parametrize("transports", ["all", "tcp"])
def test_blocks_arrive_over_ucx(transports):
    packages = subprocess.check_output([PYTHON, "-c", "import site; print(site.getsitepackages()[0])"], text=True)
    found = subprocess.run(
        [sys.executable, "-c", SPLIT, "tiny-model", packages.strip()],
        env=os.environ | {"UCX_TLS": transports}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "split over nixl" in found.stdout, found.stdout + found.stderr
