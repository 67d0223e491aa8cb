"""Damaged and absurd model folders: refused with one sentence, soon, without a traceback and without their memory."""

import argparse
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from bench.torture.promises import Outcome, main
from bench.torture.server import ROOT, serving, temporary_folder

BUNDLED = ROOT / "scenarios" / "tiny-model"
REFUSED_SECONDS = 40  # torch's import takes most of it on a busy machine
PEAK_BYTES = 3 << 30  # of all processes of the server together


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def file(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Replaces a file, or removes it."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)

    return change


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for shard in folder.glob("*.safetensors"):
            shard.write_bytes(change(shard.read_bytes()))

    return apply


def header(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    """Changes the header of the weights, and leaves their bytes."""

    def apply(content: bytes) -> bytes:
        (size,) = struct.unpack("<Q", content[:8])
        changed = json.dumps(change(json.loads(content[8 : 8 + size]))).encode()
        return struct.pack("<Q", len(changed)) + changed + content[8 + size :]

    return weights(apply)


def far(described: dict) -> dict:
    """The last tensor lies far behind the end of the file."""
    name = next(name for name in reversed(described) if name != "__metadata__")
    return described | {name: described[name] | {"data_offsets": [10**15, 10**15 + 8]}}


def reshaped(described: dict) -> dict:
    """A matrix with another shape of the same size."""
    name, entry = next((n, e) for n, e in described.items() if n != "__metadata__" and len(e["shape"]) == 2)
    return described | {name: entry | {"shape": [entry["shape"][0] * 2, entry["shape"][1] // 2]}}


ENDLESS = b"{% for x in range(9999) %}{% for y in range(9999) %}{% endfor %}{% endfor %}"
CASES: dict[str, Callable[[Path], None]] = {
    "weights cut in half": weights(lambda content: content[: len(content) // 2]),
    "10^9 layers": config(num_hidden_layers=10**9),
    "vocabulary of 10^12": config(vocab_size=10**12),
    "positions to 10^12": config(max_position_embeddings=10**12),
    "a tensor behind the end of the file": header(far),
    "hidden size of 10^9": config(hidden_size=10**9),
    "10^9 heads": config(num_attention_heads=10**9),
    "a head size of 10^9": config(head_dim=10**9),
    "intermediate size of 10^12": config(intermediate_size=10**12),
    "weights of another shape": header(reshaped),
    "weights of garbage": weights(lambda content: b"\xff" * 5000),
    "weights of 2^63 bytes header": weights(lambda content: struct.pack("<Q", 2**63) + content[8:]),
    "empty weights": weights(lambda content: b""),
    "no weights": lambda folder: [shard.unlink() for shard in folder.glob("*.safetensors")] and None,
    "weights as a pickle": lambda folder: [
        shard.rename(folder / "pytorch_model.bin") for shard in folder.glob("*.safetensors")
    ] and None,
    "an index that leaves the folder": file(
        "model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}'
    ),
    "config.json that is no JSON": file("config.json", b'{"architectures": ['),
    "config.json of a list": file("config.json", b"[]"),
    "config.json of binary": file("config.json", bytes(range(256))),
    "negative layers": config(num_hidden_layers=-3),
    "layers of text": config(num_hidden_layers="many"),
    "unknown architecture": config(architectures=["NobodyForCausalLM"]),
    "tokenizer of garbage": file("tokenizer.json", b"\x00garbage"),
    "no tokenizer": file("tokenizer.json", None),
    "a template that is none": file("chat_template.jinja", b"{% for x in %}"),
    "a template without an end": file("chat_template.jinja", ENDLESS),
}  # fmt: skip
SHORT = 5  # the first ones: those that once failed


def refuse(outcome: Outcome, name: str, change: Callable[[Path], None]) -> None:
    with temporary_folder() as folder:
        model = folder / "model"
        shutil.copytree(BUNDLED, model)
        change(model)
        with serving(model=str(model), wait_ready=False) as server:
            started, peak, code = time.monotonic(), 0, None
            while code is None and time.monotonic() - started < REFUSED_SECONDS + 20 and peak < 2 * PEAK_BYTES:
                code = server.wait(0.1)
                peak = max(peak, sum(rss(pid) for pid in server.group()))
            took, text = time.monotonic() - started, server.text()
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1][:140].replace(str(model), "MODEL") if lines else "nothing"
    clean = code == 1 and "Traceback" not in text
    outcome.check(f"{name}: exit code 1, a sentence, no traceback", clean, f"exit code {code}; {last}")
    outcome.below(f"{name}: refused after", took, REFUSED_SECONDS, "s", f"peak {peak / 2**20:.0f} MiB")
    if peak > PEAK_BYTES:
        outcome.check(f"{name}: memory", False, f"{peak / 2**20:,.0f} MiB", f"{PEAK_BYTES / 2**20:,.0f} MiB")


def rss(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Model folders that cannot be served."""
    cases = list(CASES.items())
    for name, change in cases[:SHORT] if arguments.short else cases:
        refuse(outcome, name, change)


if __name__ == "__main__":
    main("models", run)
