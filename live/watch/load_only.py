"""What load alone shows, where no end and no latency of a request is known: a log, or a page without such families."""

from sojourn.diagnosis.statements.means import MOSTLY, stands_at_cap
from sojourn.interop.sources.pressure import GENERATED, WAITING
from sojourn.interop.sources.translate import of_family
from sojourn.interop.sources.view import ServerView
from sojourn.live.watch.document import State

NOT_SHOWN = "how long requests take is not shown"


def is_load_only(view: ServerView) -> bool:
    """Tokens came, and no request is known to have ended. Servers that count ends at all count the first at once."""
    return view.finished is None and not view.latencies and bool(of_family(view.totals, GENERATED))


def state_of_load(view: ServerView) -> tuple[State, str]:
    """By the line, the batch and the KV cache."""
    waiting, line = view.gauges.get(WAITING), view.waiting
    if waiting is None or line is None or waiting.mean < 1 or line.share < MOSTLY:
        few = "few requests wait" if waiting is not None else "how many requests wait is not shown"
        return "cannot tell", f"Tokens come, and {few}; {NOT_SHOWN}"
    what = f"{waiting.mean:,.0f} requests wait on average, and up to {waiting.largest:,.0f}"
    if (line.with_kv_full or 0.0) >= MOSTLY:
        lost = f", and {view.preemptions:,.0f} lost theirs meanwhile" if view.preemptions else ""
        return "degraded", f"{what}, while the KV cache is full ({view.kv_largest or 0.0:.0%}){lost}"
    if stands_at_cap(view):
        return "overloaded", (
            f"{what}, while never more than {line.largest_batch or 0.0:,.0f} run and the KV cache has room: either the "
            "batch is capped at that, or the device is full"
        )
    grows = " and ever more" if (line.growth or 0.0) > 1 else ""
    return "cannot tell", f"{what}{grows}; what they wait for is not shown"
