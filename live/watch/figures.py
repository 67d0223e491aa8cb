"""Figures of a watched server that are shown beside its verdict: rates of now, and where a request's time went."""

from collections.abc import Sequence
from itertools import pairwise

from sojourn.interop.sources.view import ServerView
from sojourn.live.watch.document import Now, Part
from sojourn.live.watch.moments import Moment

RATE_S = 10.0  # that the rates of `now` are over
PHASES = {
    "request.queue": "queue", "request.admission": "queue", "memory.blocked": "queue", "request.quota": "queue",
    "compute.prefill": "prefill", "compute.decode": "decode", "request.interference": "others' prompts",
    "memory.preempted": "memory", "memory.recompute": "memory", "request.stream": "writing", "compute.host": "host",
    "token.encode": "text", "token.sample": "text", "token.decode": "text",
}  # fmt: skip
REST = "rest"


def now_of(own: Sequence[Moment]) -> Now:
    """Gauges of the last moment of a server, and its rates over the last seconds."""
    last = own[-1]
    recent = [moment for moment in own if moment.ns >= last.ns - RATE_S * 1e9]
    recent = recent if len(recent) > 1 else own[-2:]  # a Prometheus may scrape less often

    def rate(name: str) -> float | None:
        amounts = [
            (getattr(moment, name), (moment.ns - before.ns) / 1e9)
            for before, moment in pairwise(recent)
            if getattr(moment, name) is not None
        ]
        seconds = sum(each for _, each in amounts)
        return sum(per_s * each for per_s, each in amounts) / seconds if seconds else None

    rates = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")
    return Now(running=last.running, waiting=last.waiting, kv_use=last.kv_use, **{name: rate(name) for name in rates})


def parts_of(view: ServerView) -> list[Part]:
    """Where the mean request's time in the server went, largest first."""
    whole_ms = view.server_ms
    if not whole_ms:
        return []
    spent: dict[str, float] = {}
    for span in view.spans:
        name = PHASES.get(span.accounts[0], REST)
        spent[name] = spent.get(name, 0.0) + span.mean_ms
    spent[REST] = spent.get(REST, 0.0) + max(0.0, whole_ms - sum(spent.values()))
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    return [Part(name=name, mean_ms=ms, share=ms / whole_ms) for name, ms in ranked if ms > 0]
