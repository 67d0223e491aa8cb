"""The programs that marked tests need. A test has the mark, and is skipped where they are missing."""

import importlib.util
import shutil
from functools import cache

from sojourn.ui.screenshots import chromium


@cache
def missing(mark: str) -> str:
    """Why the tests of a mark cannot run here; "" where they can."""
    if mark == "prometheus" and not (shutil.which("prometheus") and shutil.which("promtool")):
        return "needs Debian's prometheus"
    if mark == "browser" and (chromium() is None or importlib.util.find_spec("playwright") is None):
        return "needs chromium and playwright"
    if mark == "compiler":
        from sojourn.engine.compute.cpp import extension

        return extension.unavailable() or ""
    return ""
