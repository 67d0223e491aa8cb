"""What `pip install` puts into an environment: one name."""

import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = runpy.run_path(str(ROOT / "setup.py"))["ROOMS"]
USE = """
import engine, metrics, sojourn, ui
from sojourn.engine.config import EngineConfig
from sojourn.metrics.records import StepRecord
assert metrics.mine and engine.mine and ui.mine
assert len(sojourn.list_runs(".")) == 0
print(EngineConfig(model="tiny-model").model, StepRecord.__module__)
"""


def use_beside_others(folder: Path, python_path: Path) -> str:
    """What `USE` prints in a folder whose own modules have the names of our rooms."""
    for name in ("engine", "metrics", "ui"):
        (folder / f"{name}.py").write_text("mine = True\n")
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=folder, env={"PYTHONPATH": str(python_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_may_have_modules_of_the_names_of_our_rooms(tmp_path):
    assert use_beside_others(tmp_path, ROOT) == "tiny-model sojourn.metrics.records.step\n"


def test_a_wheel_holds_one_name_and_works(tmp_path):
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml asks of a build
    source, site, work = tmp_path / "source", tmp_path / "site", tmp_path / "work"
    source.mkdir()
    work.mkdir()
    for name in (*ROOMS, "sojourn"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name.partition("/")[0] for name in wheel.namelist()}
        assert {name for name in names if not name.endswith(".dist-info")} == {"sojourn"}
        wheel.extractall(site)
    assert {path.name for path in (site / "sojourn").iterdir() if path.is_dir()} == set(ROOMS)
    ours = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    theirs = {path.relative_to(site / "sojourn") for path in (site / "sojourn").rglob("*")}
    left_out = {path for path in ours - theirs if "__pycache__" not in path.parts}
    assert {path.suffix for path in left_out} <= {".md", ".txt", ".yaml", ".yml"}, sorted(map(str, left_out))[:20]
    assert use_beside_others(work, site) == "tiny-model sojourn.metrics.records.step\n"
