"""Builds the C++ kernels of this folder into one shared library, once for each machine, and loads it.

The kernels have a plain C interface (pointers, sizes, strides) and know no torch header, so that they build in seconds
and with any version of torch. They share torch's OpenMP runtime and with it its threads: `torch.set_num_threads`
governs both. A call releases the GIL.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from sojourn.metrics.errors import SojournError

COMPILERS = ("g++", "c++")  # not clang: the kernels use vector functions of gcc, and gcc's OpenMP is torch's
# Not -ffast-math: infinities and NaN must come out of the kernels as they do out of torch.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp",
    "-fPIC", "-Wall",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-fopenmp", "-Wl,--as-needed")
SOURCES = Path(__file__).parent
BUILD_TIMEOUT_SECONDS = 300
DIGEST_BYTES = 32

log = logging.getLogger(__name__)


class BuildError(SojournError):
    """Why there are no C++ kernels here, as a sentence."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels."""

    path: Path
    handle: ctypes.CDLL

    def function(self, name: str, *argument_types: type) -> Callable[..., None]:
        """The kernel `name`, which returns nothing. Raises AttributeError if no source file defines it."""
        return ctypes.CFUNCTYPE(None, *argument_types)((name, self.handle))

    def address(self, name: str) -> int:
        """Where the kernel `name` is, for another kernel that calls it."""
        return ctypes.cast(getattr(self.handle, name), ctypes.c_void_p).value


def library() -> Library | None:
    """The kernels, built first where they are not yet; None where they cannot be built: `unavailable` says why."""
    outcome = _outcome()
    return outcome if isinstance(outcome, Library) else None


def unavailable() -> str | None:
    """Why `library` is None, as a sentence; None where it is not."""
    outcome = _outcome()
    return outcome if isinstance(outcome, str) else None


@functools.cache
def _outcome() -> Library | str:
    try:
        return load(find_compiler(), cache_folder())
    except BuildError as error:
        log.warning("torch computes what the C++ kernels would do faster: %s", error)
        return str(error)


def find_compiler() -> str:
    """$CXX, or the first C++ compiler of the search path. Raises BuildError."""
    for name in (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS:
        if path := shutil.which(name):
            return path
    if os.environ.get("CXX"):
        raise BuildError(f"CXX={os.environ['CXX']} is not a program; name a C++ compiler or unset it")
    raise BuildError(f"no C++ compiler was found ({', '.join(COMPILERS)}); install g++, or name one by CXX")


def cache_folder() -> Path:
    """The folder of built kernels, shared by runs. Raises BuildError."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise BuildError("there is no home folder to keep built kernels in; set XDG_CACHE_HOME") from None
    return base / "sojourn" / "cpp"


def load(compiler: str, folder: Path, sources: Path = SOURCES) -> Library:
    """The library of `sources` for this compiler and this machine: out of `folder`, or built into it.

    Raises BuildError.
    """
    path = folder / _key(compiler, sources) / "kernels.so"
    if not _is_whole(path):
        _build(compiler, sources, path)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded ({error}); delete it and try again") from None
    handle.sojourn_openmp_runtime.restype = ctypes.c_void_p
    if handle.sojourn_openmp_runtime() != _openmp_runtime_of_torch():
        raise BuildError(f"{compiler} binds to another OpenMP runtime than torch's; use g++, or name it by CXX")
    return Library(path, handle)


def _torch_lib() -> Path:
    return Path(torch.__file__).parent / "lib"


def _openmp_runtime_of_torch() -> int | None:
    try:
        function = ctypes.CDLL(str(_torch_lib() / "libtorch_cpu.so")).omp_get_max_threads
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _openmp_of_torch() -> Path | None:
    """The runtime that torch's wheel brings, sometimes under a name of its own; None: the system's."""
    found = sorted(_torch_lib().glob("libgomp*.so*")) or sorted(_torch_lib().parents[1].glob("torch.libs/libgomp*.so*"))
    return found[0] if found else None


def _key(compiler: str, sources: Path) -> str:
    """Names everything that the machine code depends on."""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run ({error})") from None
    texts = [path.read_text("utf-8") for path in sorted((*sources.glob("*.cpp"), *sources.glob("*.h")))]
    parts = (version, platform.machine(), _cpu_features(), *FLAGS, *LINK_FLAGS, str(_openmp_of_torch()), *texts)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_features() -> str:
    """What -march=native sees: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _is_whole(path: Path) -> bool:
    """A file ends with the digest of what stands before: loading a truncated library would kill the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _build(compiler: str, sources: Path, path: Path) -> None:
    """Compiles beside `path` and moves the result there: of two processes that build at once, one is the last."""
    started = time.monotonic()
    runtime = _openmp_of_torch()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
            built = Path(scratch) / path.name
            objects = {str(source): str(built.with_name(f"{source.stem}.o")) for source in sources.glob("*.cpp")}
            commands = [[compiler, *FLAGS, "-c", source, "-o", target] for source, target in objects.items()]
            list(pool.map(_run, commands))
            # torch's runtime stands before the one that -fopenmp adds, which is then not needed.
            _run([compiler, *objects.values(), *([str(runtime)] if runtime else []), *LINK_FLAGS, "-o", str(built)])
            with built.open("ab") as file:
                file.write(hashlib.sha256(built.read_bytes()).digest())
            os.replace(built, path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error}); set XDG_CACHE_HOME to another folder") from None
    log.info("built the C++ kernels in %.1f s: %s", time.monotonic() - started, path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {BUILD_TIMEOUT_SECONDS} s to build the kernels") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200].strip())
        raise BuildError(f"{command[0]} could not build the kernels: {first}")
