"""What first.sh knows of its stages, in one file that is whole after each of them. Needs nothing but Python.

python bench/gpu/stages.py WORK FIRST_JSON STAGE STATUS SECONDS
python bench/gpu/stages.py --facts FACTS_JSON
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

LARGEST_BYTES = 4 << 20  # of a stage's figures
TAIL = 6  # lines of a log
NEEDED = (
    "torch", "triton", "numpy", "pydantic", "msgspec", "zmq", "jinja2", "llguidance", "tokenizers", "safetensors",
    "re2", "locust", "duckdb", "pandas", "pyarrow", "psutil", "typer", "rich", "pytest", "transformers",
)  # fmt: skip


def add_stage(work: Path, path: Path, name: str, status: int, seconds: int) -> None:
    """Adds a stage with the end of its log, and takes in every JSON file of `work`."""
    known = json.loads(path.read_text())["stages"] if path.exists() else []
    log = work / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = [line[:300] for line in lines if line.strip()][-TAIL:]
    stage = {"stage": name, "status": status, "seconds": seconds, "tail": tail}
    figures = {part.stem: _figures(part) for part in sorted(work.glob("*.json"))}
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"stages": [*known, stage], "figures": figures}, indent=1))
    new.replace(path)
    print(f"{name}: status {status} after {seconds} s; {tail[-1] if tail else 'no output'}", flush=True)


def _figures(path: Path) -> Any:
    """A stage that was cut short may leave half a file."""
    if path.stat().st_size > LARGEST_BYTES:
        return f"too large: {path.stat().st_size:,} bytes"
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        return f"cut short: {error}"


def facts() -> dict[str, Any]:
    """Versions, what a compiler needs, and the device."""
    found: dict[str, Any] = {"python": sys.version}
    for name in NEEDED:
        began = time.monotonic()
        try:
            version = getattr(importlib.import_module(name), "__version__", "?")
            found[name] = [version, round(time.monotonic() - began, 2)]
        except Exception as error:  # whatever an import raises is a fact
            found[name] = repr(error)[:200]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    found |= {"gcc": shutil.which("gcc"), "python_h": header.exists(), "cpus": os.cpu_count()}
    if shutil.which("nvidia-smi"):
        found["nvidia_smi"] = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout[-1500:]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "free_and_total_bytes": torch.cuda.mem_get_info()}
    return found


def unpack(path: Path, folder: Path) -> list[str]:
    """Writes the figures of each stage to a file of their own, as `bench.report.gather` reads them. Returns the names;
    those of a stage that was cut short are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        name: part for name, part in json.loads(path.read_text())["figures"].items() if not isinstance(part, str)
    }
    for name, part in figures.items():
        (folder / f"{name}.json").write_text(json.dumps(part))
    return list(figures)


def main() -> None:
    if sys.argv[1] == "--facts":
        Path(sys.argv[2]).write_text(json.dumps(facts(), indent=1))
        return
    if sys.argv[1] == "--unpack":
        print(*unpack(Path(sys.argv[2]), Path(sys.argv[3])))
        return
    work, path, name, status, seconds = sys.argv[1:]
    add_stage(Path(work), Path(path), name, int(status), int(seconds))


if __name__ == "__main__":
    main()
