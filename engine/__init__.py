"""A continuous-batching inference engine with an OpenAI-compatible server; `LLM` is its offline use."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sojourn.engine.llm import LLM
    from sojourn.engine.sampling import Grammar, SamplingParams

FIRST_LINE_NS = time.monotonic_ns()  # of this process: what lies before is the start of its interpreter

__all__ = ["LLM", "Grammar", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: the front process and the command line import this package without a model's weight."""
    if name == "LLM":
        from sojourn.engine.llm import LLM

        return LLM
    if name in ("Grammar", "SamplingParams"):
        from sojourn.engine import sampling

        return getattr(sampling, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
