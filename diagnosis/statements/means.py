"""What a foreign server's own metrics show: gauges once a second, and means over all requests.

Rules on means say what was seen beside the waiting, never that nothing else could have been the cause; no such metric
shows whether the device had room for more.
"""

import math
from dataclasses import dataclass

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, Gain
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.interop.sources.courses import EngineLoad
from sojourn.interop.sources.pressure import GAPS, WAITING
from sojourn.interop.sources.source import DRAFT_ROUNDS
from sojourn.interop.sources.translate import of_family
from sojourn.interop.sources.view import ServerView

FEWEST_SAMPLES = 3  # of a gauge with requests waiting: one or two may be chance
MOSTLY = 0.5  # of those samples
PREEMPTED_OFTEN = 0.1  # preemptions a finished request
GAUGES, HISTOGRAMS, COUNTERS = "scrapes: gauges", "scrapes: histograms", "scrapes: counters"
TTFT = "sojourn_request_ttft_seconds"
PROMPT, OUTPUT = "sojourn_token_prompt_tokens_total", "sojourn_token_generated_tokens_total"
DRAFTED, ACCEPTED = "sojourn_token_drafted_tokens_total", "sojourn_token_accepted_tokens_total"
UNEVEN, BESIDE_IDLE, LEAST_LINE = 1.3, 0.5, 0.5  # as `replica_imbalance`; requests that wait on average
FEW = 8  # running requests: of so few a step reads all weights for few tokens, so that the cap is named alone
AT_ONE_SIZE = 0.8  # of those samples: a batch that grows and shrinks has no limit that shows
STANDS = 0.4  # of all samples, in which a line stands: gauges that stand still in a long step look like a cap
PROMPTS_ONLY, FULL_STEP = 0.9, 512  # of the computed tokens; tokens that a step computes on average
FULL_CORE = 0.85  # of one core: an event loop that has used so much of it had no more
SAME_REQUESTS = 0.05  # of the first tokens, by which the ends may differ
PROMPT_WORK = 0.5  # of the tokens that are computed: below it prompts are no large part of what steps do


def prompt_work(view: ServerView) -> float | None:
    """The share of prompts in the tokens that the server computed; None where it does not count them."""
    prompt, output = (of_family(view.totals, name) for name in (PROMPT, OUTPUT))
    if prompt is None or not output:
        return None
    computed = prompt * (1 - (view.hit_rate or 0.0))
    return computed / (computed + output)


def stands_at_cap(view: ServerView) -> bool:
    """Whether as many run as ever while others wait, the KV cache has room, and prompts do not fill the steps."""
    waiting = view.waiting
    if waiting is None or (waiting.with_kv_free or 0.0) < MOSTLY or waiting.one_more_fits is False:
        return False
    is_small = (waiting.largest_batch or 0.0) <= FEW and waiting.share >= STANDS
    least = MOSTLY if is_small else AT_ONE_SIZE  # a few end together between two samples
    if (waiting.at_largest_batch or 0.0) < least:
        return False
    return not prompts_fill_steps(view)


def prompts_fill_steps(view: ServerView) -> bool:
    """Whether nearly all that steps compute is prompts, and so many tokens that a device computes them one by one."""
    work, gaps = prompt_work(view), view.latencies.get(GAPS)
    if work is None or gaps is None or work < PROMPTS_ONLY:
        return False
    computed = (of_family(view.totals, OUTPUT) or 0.0) / (1 - work) if work < 1 else math.inf
    return computed / view.seconds * gaps.mean >= FULL_STEP


def queue_share(view: ServerView, excess: Excess) -> float:
    """The queue's part of what an objective bounds. Of a line that grows the requests that ended show too little."""
    queue, wait_s = view.queue, line_wait_s(view)
    share, ttft = span_share(queue, excess), view.latencies.get(TTFT)
    if queue is None or queue.ttft_share is None or not wait_s or ttft is None or excess.objective != "ttft_ms":
        return share
    own_s = ttft.mean * (1 - min(1.0, queue.ttft_share))
    return max(share, wait_s / (wait_s + own_s))


def line_wait_s(view: ServerView) -> float | None:
    """How long those that wait now will have waited: as many as wait, over those that leave the line per second
    (Little's law). Those that get a first token or end leave it. None where the server does not say how many wait."""
    waiting, ttft = view.gauges.get(WAITING), view.latencies.get(TTFT)
    if waiting is None:
        return None
    return view.seconds * waiting.mean / max(view.finished or 0.0, ttft.count if ttft is not None else 0.0, 1.0)


def queue_evidence(view: ServerView, excess: Excess | None) -> list[Evidence]:
    queue = view.queue
    if queue is None or excess is None or excess.objective == "tpot_ms":
        return []
    share = queue_share(view, excess)
    return [
        evidence(f"{share:.0%} of {quantity(excess)} is {view.title}'s queue: {queue.mean_ms:,.0f} ms on average over "
                 f"all requests that ended, late or not{_line(view, excess, share)}", share, "share",
                 "scrapes: histograms", supports=share >= EXPLAINS_ENOUGH)
    ]  # fmt: skip


def _line(view: ServerView, excess: Excess, share: float) -> str:
    """Where those that wait now raise the share above that of the requests that ended."""
    return "; those that wait now wait longer" if share > span_share(view.queue, excess) + 0.01 else ""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What steps with drafts gave, on average over all of them. A round is one request in one step."""

    depth: float  # drafts of a round
    accepted: float  # of them
    rows: float  # of all that steps computed, what rounds had, 0 to 1

    @property
    def share(self) -> float:
        return self.accepted / self.depth

    def lost_share(self, batch_gain: float) -> float:
        """Of the time per token, what drafts took more than they saved; below 0 they saved more.

        From what twice the batch gives: 2 where rows of a step cost nothing, 1 where they are all that it costs.
        """
        of_rows = self.rows * min(1.0, max(0.0, 2 / batch_gain - 1))
        step_without = 1 - of_rows * self.depth / (1 + self.depth)
        return 1 - step_without * (1 + self.accepted)


def draft_counts(view: ServerView) -> DraftCounts | None:
    """None of a server without drafts, or that does not count the rounds: then each token but the first and those
    that were accepted is of a round."""
    drafted, accepted, output = (of_family(view.totals, name) for name in (DRAFTED, ACCEPTED, OUTPUT))
    if not drafted or accepted is None or not output:
        return None
    ttft = view.latencies.get(TTFT)
    counted = view.further.get(DRAFT_ROUNDS) or output - accepted - (ttft.count if ttft is not None else 0.0)
    rounds = max(counted, 1.0)
    prompt = (of_family(view.totals, PROMPT) or 0.0) * (1 - (view.hit_rate or 0.0))
    rows = rounds + drafted
    return DraftCounts(drafted / rounds, accepted / rounds, rows / (rows + prompt))


@dataclass(frozen=True, slots=True)
class Uneven:
    """Engines of one page, of which one has far more requests than another."""

    fullest: EngineLoad
    emptiest: EngineLoad
    times: float  # the requests of the fullest over the mean
    work: float  # its generated tokens over the mean
    of_waiting: float  # its share of all that wait


def uneven_engines(view: ServerView) -> Uneven | None:
    """None where the requests are about even, or nobody waits."""
    engines = sorted(view.courses.engines, key=lambda each: each.requests)
    waiting = sum(each.waiting for each in engines)
    if len(engines) < 2 or waiting < LEAST_LINE:
        return None
    count, full, empty = len(engines), engines[-1], engines[0]
    times = full.requests * count / sum(each.requests for each in engines)
    if times < UNEVEN or empty.requests > BESIDE_IDLE * full.requests or empty.waiting > BESIDE_IDLE * full.waiting:
        return None
    tokens = sum(each.tokens for each in engines)
    return Uneven(full, empty, times, full.tokens * count / tokens if tokens else 1.0, full.waiting / waiting)


def before_core(view: ServerView) -> float | None:
    """The share of the mean time to first token that is neither queue nor prefill. None where that is not known: first
    tokens and ends of the window are of other requests."""
    ttft, queue, prefill = view.latencies.get(TTFT), view.queue, view.span("compute.prefill")
    if ttft is None or queue is None or prefill is None or queue.ttft_ms is None or prefill.ttft_ms is None:
        return None
    if abs(ttft.count - prefill.requests) > SAME_REQUESTS * ttft.count or not ttft.mean:
        return None
    return max(0.0, 1 - (queue.ttft_ms + prefill.ttft_ms) / (1e3 * ttft.mean))


def part_of_excess(excess: Excess, share: float) -> float:
    """Of what lies above the bound, the part that goes where this share of the whole does; 0 to 1."""
    above = excess.mean_ms - excess.bound_ms
    return min(1.0, share * excess.mean_ms / above) if above > 0 else share


def quantity(excess: Excess) -> str:
    names = {"ttft_ms": "the time to first token", "tpot_ms": "the time per output token"}
    return names.get(excess.objective, "the latency")


def time_gained(view: ServerView, time: str) -> Gain:
    unseen = f"{view.title} does not show whether the device could serve more"
    return Gain(f"at most the {time}", basis=f"means over {view.finished or 0:,.0f} requests; {unseen}")
