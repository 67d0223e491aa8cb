"""Load: schedules, open-loop replay on Locust, timing of every chunk. Imports no engine and no torch.

`LLMUser` and `Answer` are for locustfiles. They load Locust, which patches the interpreter, so only who asks gets it.
"""

from importlib import import_module
from typing import Any

__all__ = ["Answer", "LLMUser"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("sojourn.loadgen.tasks.session")  # registers what Locust calls at START and STOP
    return getattr(import_module("sojourn.loadgen.tasks.llm_user"), name)
