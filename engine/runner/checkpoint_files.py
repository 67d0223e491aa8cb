"""A digest of a checkpoint's files, cheap enough for each start."""

import hashlib
import os
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 256, 4096  # of each file of weights


def files_digest(folder: Path, *, is_dummy: bool, said: bytes = b"") -> bytes:
    """16 bytes that differ wherever the files could give another model, or `said` is other.

    Of weights their sizes, times of change, headers and samples count: to read all of them would delay each start.
    """
    digest = hashlib.blake2b(said, digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".safetensors", ".gguf", ".bin") and path.is_file():
            digest.update(path.name.encode() + _sampled(path, is_dummy))
    return digest.digest()


def _sampled(path: Path, is_dummy: bool) -> bytes:
    stat = path.stat()
    if path.suffix == ".json":
        return path.read_bytes() if path.name == "config.json" else b""
    if is_dummy:
        return b""
    digest = hashlib.blake2b(f"{stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=16)
    with open(path, "rb", buffering=0) as file:
        digest.update(file.read(1 << 16))
        for index in range(SAMPLES):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, index * stat.st_size // SAMPLES))
    return digest.digest()
