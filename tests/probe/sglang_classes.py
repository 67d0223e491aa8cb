"""Runs in an environment with SGLang and no CUDA: hooks the probe into SGLang's own classes, and says what was hooked.

Packages that need a GPU's driver to be imported are stood in for; nothing is computed. One JSON object comes out.
"""

import importlib.abc
import importlib.machinery
import json
import logging
import sys
from unittest.mock import MagicMock

DEVICE_ONLY = ("sgl_kernel", "deep_gemm", "flashinfer")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        wanted = name.split(".")[0] in DEVICE_ONLY
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        return module

    def exec_module(self, module):
        pass


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


sys.meta_path.insert(0, StandIns())
kept = Kept()
logging.getLogger("sojourn_probe").addHandler(kept)

from sglang.srt.entrypoints import http_server  # noqa: E402  # the front: its app gets the middleware
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.version import __version__  # noqa: E402
from sojourn_probe.sglang import NEEDED, plugin  # noqa: E402
from sojourn_probe.signatures import misfit  # noqa: E402

misfits = {name: misfit(Scheduler, name, names) for name, names in NEEDED.items()}
before = {name: getattr(Scheduler, name) for name in NEEDED}
plugin()
HookRegistry.apply_hooks()
print(json.dumps({
    "version": __version__, "misfits": misfits, "said": kept.said,
    "hooked": [name for name in NEEDED if getattr(Scheduler, name) is not before[name]],
    "front": hasattr(TokenizerManager.generate_request, "__wrapped__"),
    "middleware": [each.cls.__name__ for each in http_server.app.user_middleware],
}))  # fmt: skip
