"""What a foreign server's own metrics show: gauges once a second, and means over all requests.

Rules on means say what was seen beside the waiting, never that nothing else could have been the cause; no such metric
shows whether the device had room for more.
"""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, Gain
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.interop.sources.translate import of_family
from sojourn.interop.sources.view import ServerView

FEWEST_SAMPLES = 3  # of a gauge with requests waiting: one or two may be chance
MOSTLY = 0.5  # of those samples
PREEMPTED_OFTEN = 0.1  # preemptions a finished request
GAUGES, HISTOGRAMS, COUNTERS = "scrapes: gauges", "scrapes: histograms", "scrapes: counters"
PROMPT, OUTPUT = "sojourn_token_prompt_tokens_total", "sojourn_token_generated_tokens_total"
PROMPT_WORK = 0.5  # of the tokens that are computed: below it prompts are no large part of what steps do


def prompt_work(view: ServerView) -> float | None:
    """The share of prompts in the tokens that the server computed; None where it does not count them."""
    prompt, output = (of_family(view.totals, name) for name in (PROMPT, OUTPUT))
    if prompt is None or not output:
        return None
    computed = prompt * (1 - (view.hit_rate or 0.0))
    return computed / (computed + output)


def queue_evidence(view: ServerView, excess: Excess | None) -> list[Evidence]:
    queue = view.span("request.queue")
    if queue is None or excess is None:
        return []
    share = span_share(queue, excess)
    return [
        evidence(f"{share:.0%} of {quantity(excess)} is {view.title}'s queue ({queue.mean_ms:,.0f} ms), on average "
                 "over all requests, late or not", share, "share", "scrapes: histograms",
                 supports=share >= EXPLAINS_ENOUGH)
    ]  # fmt: skip


def quantity(excess: Excess) -> str:
    return "the time to first token" if excess.objective == "ttft_ms" else "the latency"


def time_gained(view: ServerView, time: str) -> Gain:
    unseen = f"{view.title} does not show whether the device could serve more"
    return Gain(f"at most the {time}", basis=f"means over {view.finished or 0:,.0f} requests; {unseen}")
