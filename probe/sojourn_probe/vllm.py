"""The two names that vLLM is given: `--scheduler-cls sojourn_probe.vllm.Scheduler --middleware
sojourn_probe.vllm.Middleware`."""

from sojourn_probe.versions import vllm_version
from sojourn_probe.vllm_front import Middleware

__all__ = ["Middleware", "vllm_version"]


def __getattr__(name: str) -> type:
    """The scheduler is made when it is asked for: only the process of the engine's loop needs vLLM's own."""
    if name != "Scheduler":
        raise AttributeError(name)
    from sojourn_probe.vllm_scheduler import scheduler_class

    globals()["Scheduler"] = made = scheduler_class()
    return made
