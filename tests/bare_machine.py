"""A machine where nothing is installed but Python and the system's own programs."""

import os
from collections.abc import MutableMapping
from fnmatch import fnmatch
from pathlib import Path

HIDDEN = (
    "prometheus", "promtool", "grafana*", "chromium*", "google-chrome*", "firefox*", "node", "nodejs", "npm", "npx",
    "tsc", "cc", "c++", "gcc*", "g++*", "clang*", "*-linux-gnu-gcc*", "*-linux-gnu-g++*", "nvcc", "nvidia-smi",
    "docker*", "podman", "redis-server", "openssl", "git", "perf", "gdb", "py-spy",
)  # fmt: skip
NO_HOME = "/dev/null/home"  # cannot be made or written, by root neither


def make_bare(environ: MutableMapping[str, str], folder: Path) -> None:
    """Changes `environ`: PATH names one folder of links to the programs that are not hidden; HOME cannot be written."""
    programs = folder / "programs"
    programs.mkdir()
    for place in environ.get("PATH", os.defpath).split(os.pathsep):
        for program in sorted(Path(place).glob("*")) if place else ():
            link = programs / program.name
            if not any(fnmatch(program.name, pattern) for pattern in HIDDEN) and not link.is_symlink():
                link.symlink_to(program)
    environ["PATH"] = str(programs)
    environ["HOME"] = NO_HOME
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "CC", "CXX"):
        environ.pop(name, None)
