"""What one RequestRecord says for itself: how it ended, how long it took, which objectives it met."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from sojourn.metrics.records import RequestRecord
from sojourn.metrics.request.objectives import EVERY_CLASS

SERVED = ("stop", "length")

Bounds = Mapping[str, Mapping[str, float]]  # class → objective → milliseconds


def outcome(request: RequestRecord) -> str:
    """stop, length, abort or error. An error counts for more than a finish reason."""
    return "error" if request.error is not None else request.finish_reason or "error"


def latencies_ns(request: RequestRecord) -> dict[str, float]:
    """The latencies that have objectives, by the objective's name; without those that the request does not have."""
    found: dict[str, float] = {}
    token_ns = request.token_ns
    if request.first_written_ns is not None:
        found["ttft_ms"] = request.first_written_ns - request.arrived_ns
    longest = request.longest_output_tokens or len(token_ns)  # several choices grow side by side
    if longest > 1 and len(token_ns) > 1:
        found["tpot_ms"] = (token_ns[-1] - token_ns[0]) / (longest - 1)
    if request.written_ns is not None and outcome(request) in SERVED:
        found["e2e_ms"] = request.written_ns - request.arrived_ns
    return found


def gaps_ns(token_ns: Sequence[Sequence[int]]) -> np.ndarray:
    """The time from each token of a request to its next, of all requests one after the other."""
    lengths = np.array([len(times) for times in token_ns])
    ns = np.fromiter(chain.from_iterable(token_ns), np.int64, int(lengths.sum()))
    between = np.cumsum(lengths[lengths > 0])[:-1] - 1  # from the last token of a request to the first of the next
    return np.delete(np.diff(ns), between)


def bounds_of(klass: str, objectives: Bounds) -> Mapping[str, float]:
    """The objectives that a class has: its own, or those of "all"."""
    return objectives.get(klass if klass in objectives else EVERY_CLASS, {})


def met(request: RequestRecord, latencies: Mapping[str, float], bounds_ms: Mapping[str, float]) -> dict[str, bool]:
    """Each objective → whether the request met it. What was not served has missed all of them.

    As in goodput.judged: one token has no gap that could be too long; what else never came has missed.
    """
    served = outcome(request) in SERVED
    return {
        name: served and latencies.get(name, 0 if name == "tpot_ms" else math.inf) <= bound_ms * 1e6
        for name, bound_ms in bounds_ms.items()
    }
