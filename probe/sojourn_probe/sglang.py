"""SGLang's plugin: `sglang.srt.plugins` names `plugin`, and SGLang calls it in each of its processes.

Without SOJOURN_PROBE it registers nothing. Hooks stand around SGLang's own methods and keep their results.
"""

import logging
import os
import sys
import uuid
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from sojourn_probe.records import Call
from sojourn_probe.sglang_scheduler import SchedulerProbe, clock
from sojourn_probe.signatures import misfit
from sojourn_probe.versions import version
from sojourn_probe.vllm_front import Middleware
from sojourn_probe.writer import VARIABLE

log = logging.getLogger("sojourn_probe")
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HTTP_SERVER = "sglang.srt.entrypoints.http_server"
NEEDED = {
    "_add_request_to_queue": ("req", "is_retracted"),
    "get_next_batch_to_run": (),
    "run_batch": ("batch",),
    "process_batch_result": ("batch", "result"),
    "abort_request": ("recv_req",),
}
_probes: dict[int, "SchedulerProbe | None"] = {}  # by id() of a scheduler: one a process
_call: ContextVar[Call | None] = ContextVar("sojourn_probe_call", default=None)


def plugin() -> None:
    """Registers the hooks that fit. Never raises: SGLang would log a traceback for it."""
    if not os.environ.get(VARIABLE):
        return
    try:
        _register()
    except Exception as error:
        log.warning("sojourn-probe is off: %r", error)


def _register() -> None:
    registry = import_module("sglang.srt.plugins.hook_registry")
    kinds = registry.HookType
    owner = _owner(SCHEDULER)
    faults = [fault for name, names in NEEDED.items() if (fault := misfit(owner, name, names))]
    if faults:
        log.warning("sojourn-probe is off: this is SGLang %s, and %s", version("sglang"), "; ".join(faults))
        return
    hooks = {
        "_add_request_to_queue": (_added, kinds.AFTER),
        "get_next_batch_to_run": (_planned, kinds.AROUND),
        "run_batch": (_launched, kinds.AROUND),
        "process_batch_result": (_processed, kinds.AROUND),
        "abort_request": (_aborted, kinds.AFTER),
    }
    for name, (hook, kind) in hooks.items():
        registry.HookRegistry.register(f"{SCHEDULER}.{name}", hook, kind)
    server = sys.modules.get(HTTP_SERVER)
    if server is not None and hasattr(getattr(server, "app", None), "add_middleware"):
        if fault := misfit(_owner(TOKENIZER), "generate_request", ("obj", "request")):
            log.warning("sojourn-probe does not see the HTTP server: %s", fault)
            return
        registry.HookRegistry.register(f"{TOKENIZER}.generate_request", _named, kinds.BEFORE)
        server.app.add_middleware(SGLangMiddleware)


def _owner(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


class SGLangMiddleware(Middleware):
    """The same stamps as in vLLM. SGLang takes a request's identity from its object, which `_named` gives it."""

    ENGINE = "sglang"
    PATHS = ("/v1/", "/generate")

    def entered(self, call: Call) -> None:
        _call.set(call)


def _named(manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """A single request without an identity is named after its call. A batch keeps SGLang's own names."""
    call = _call.get()
    params = getattr(obj, "sampling_params", None)
    choices = params.get("n", 1) if isinstance(params, dict) else 1
    ids = getattr(obj, "input_ids", None)
    is_one = isinstance(getattr(obj, "text", None), str) or bool(ids and isinstance(ids[0], int))
    if call is not None and getattr(obj, "rid", "") is None and is_one and choices in (None, 1):
        obj.rid = f"{call.request}-{uuid.uuid4().hex[:8]}"


def probe_of(scheduler: Any) -> "SchedulerProbe | None":
    key = id(scheduler)
    if key not in _probes:
        try:
            _probes[key] = SchedulerProbe.of(scheduler)
        except Exception as error:
            log.warning("sojourn-probe is off: %r", error)
            _probes[key] = None
    return _probes[key]


def _watch(scheduler: Any, name: str, *args: Any) -> None:
    """A fault of the probe is the end of the probe, not of the server."""
    probe = probe_of(scheduler)
    if probe is None:
        return
    try:
        getattr(probe, name)(*args)
    except Exception as error:
        _probes[id(scheduler)] = None
        log.warning("sojourn-probe switches itself off after a fault of its own: %r", error)


def _added(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    _watch(scheduler, "retracted" if is_retracted else "arrived", req)


def _planned(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    begin_ns = clock()
    _watch(scheduler, "turn", begin_ns)
    plan = original(scheduler, *args, **kwargs)
    _watch(scheduler, "planned", scheduler, plan, begin_ns)
    return plan


def _launched(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(scheduler, batch, *args, **kwargs)
    _watch(scheduler, "launched", batch)
    return result


def _processed(original: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    _watch(scheduler, "turn", clock())
    _watch(scheduler, "before_result", batch)
    found = original(scheduler, batch, result, *args, **kwargs)
    _watch(scheduler, "processed", batch)
    return found


def _aborted(result: Any, scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
    _watch(scheduler, "aborted", recv_req)
