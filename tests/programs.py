"""The programs that marked tests need. A test has the mark, and is skipped where they are missing."""

import importlib.util
import shutil
from functools import cache

from ui.screenshots import chromium


@cache
def missing(mark: str) -> str:
    """What the tests of a mark lack here, for the reason of a skip; "" where they can run."""
    if mark == "prometheus" and not (shutil.which("prometheus") and shutil.which("promtool")):
        return "Debian's prometheus"
    if mark == "browser" and (chromium() is None or importlib.util.find_spec("playwright") is None):
        return "chromium and playwright"
    return ""
