"""How fast weights are read, by way of reading and with a cold and a warm page cache, and the peak of memory.

python -m bench.weight_reading FOLDER [--repeats 3]: each reading is a process of its own, in turns with `cat` of the
same files. A cold page cache is made with posix_fadvise(DONTNEED), which needs no rights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("cat", "safetensors-stream", "safetensors-mmap")
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="one reading in this process; prints JSON")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(load(options.folder, options.way)))
        return
    found: dict[tuple[str, str], list[dict]] = {}
    for _ in range(options.repeats):
        for cache in ("cold", "warm"):
            for way in WAYS:
                make_cold(options.folder) if cache == "cold" else cat(options.folder)
                found.setdefault((cache, way), []).append(measured(options.folder, way))
    size = sum(path.stat().st_size for path in files(options.folder))
    print(f"{size / MIB:,.0f} MiB; medians of {options.repeats} turns")
    print("| page cache | way | read | load in all | peak of memory above the start | of it in pages of files |")
    print("|---|---|---|---|---|---|")
    for (cache, way), runs in found.items():
        print(f"| {cache} | {way} | {' | '.join(_shown(runs, size))} |")


def _shown(runs: list[dict], size: int) -> list[str]:
    def median(name: str) -> float | None:
        values = [run[name] for run in runs if run.get(name)]
        return statistics.median(values) if values else None

    read, whole, peak, mapped = (median(name) for name in ("read_s", "load_s", "peak_bytes", "file_bytes"))
    return [
        "–" if read is None else f"{size / MIB / read:,.0f} MiB/s",
        f"{whole:.2f} s",
        "–" if peak is None else f"{peak / MIB:,.0f} MiB",
        "–" if mapped is None else f"{mapped / MIB:,.0f} MiB",
    ]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def make_cold(folder: Path) -> None:
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cat(folder: Path) -> float:
    """Seconds of reading all files, as `cat` does."""
    began = time.monotonic()
    with Path(os.devnull).open("wb") as nowhere:
        subprocess.run(["cat", *map(str, files(folder))], stdout=nowhere, check=True)
    return time.monotonic() - began


def measured(folder: Path, way: str) -> dict:
    if way == "cat":
        seconds = cat(folder)
        return {"read_s": seconds, "load_s": seconds}
    command = [sys.executable, "-m", "bench.weight_reading", str(folder), "--way", way]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def load(folder: Path, way: str) -> dict:
    """Loads a model as the engine does, in this process."""
    import torch

    from sojourn.engine.token.models.registry import load_model
    from sojourn.metrics.compute.startup import StartupClock

    torch.set_num_threads(1)
    startup = StartupClock()
    startup.enter("conversion")
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _status("VmRSS"), time.monotonic()
    cpu = torch.device("cpu")
    model = load_model(folder, torch.float32, cpu, None, load_format=way, weights="auto", startup=startup)
    whole, phases = time.monotonic() - began, startup.startup().phases_ns
    return {
        "read_s": sum(phases.get(f"read_{tier}", 0) for tier in ("page_cache", "disk")) / 1e9,
        "load_s": whole,
        "peak_bytes": _status("VmHWM") - before,
        "file_bytes": _status("RssFile") if way.endswith("mmap") else 0,
        "weight_bytes": model.weight_bytes,
    }


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
