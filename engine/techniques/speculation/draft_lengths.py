"""How many drafts each request gets: a fixed number, or as many as measured acceptance and step times say that pay.

Pure: no clock and no torch. Times come with the outcomes of steps.

A step with n tokens in its rows takes T(n). Where the drafts of a request were accepted with the probabilities p1, p2 …
(each given that those before it were), its j-th draft adds p1 · … · pj tokens to a step. The drafts of all requests are
taken in the order of what they add, as long as the expected tokens per second of the step grow (Leviathan et al., 2023,
section 3.4, choose one length for one request; here it is the whole batch that decides).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request

NOT_WORTH, ACCEPTANCE = "step_time", "acceptance"  # reasons why a request gets no drafts
LIKELY = 0.5  # acceptance of the first draft above which it is the step's time that makes drafts a loss


class DraftLengths(Protocol):
    """Decides for how many drafts the proposer is asked behind a step."""

    writes_ahead: bool  # the proposer writes keys and values behind the known tokens
    follows_steps: bool  # the proposer sees every step: none may be planned before it was read

    def wanted(self, sampling: Sequence[Request], plan: StepPlan) -> dict[str, int]:
        """Request id → drafts, of requests that the plan samples. Those with none are counted in `plan.undrafted`."""
        ...

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """A step was committed."""
        ...


class FixedLengths:
    """The same for every request."""

    def __init__(self, most: int, *, writes_ahead: bool, follows_steps: bool):
        self.writes_ahead, self.follows_steps = writes_ahead, follows_steps
        self._most = most

    def wanted(self, sampling: Sequence[Request], plan: StepPlan) -> dict[str, int]:
        return dict.fromkeys([request.id for request in sampling], self._most)

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None: ...


class Acceptance:
    """Drafts that were accepted of those that could be, by position: those before them were. Old steps fade."""

    def __init__(self, most: int, forget: float):
        self._forget = forget
        self.tried = [0.0] * most
        self.accepted = [0.0] * most

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        reached = min(num_accepted + 1, num_drafts)
        for position in range(reached):
            self.tried[position] = self._forget * self.tried[position] + 1
            self.accepted[position] = self._forget * self.accepted[position] + (position < num_accepted)

    def rates(self, prior: Sequence[float], weight: float) -> list[float]:
        """Acceptance at each position, given those before it. `prior` counts as `weight` trials."""
        return [
            (accepted + weight * expected) / (tried + weight)
            for accepted, tried, expected in zip(self.accepted, self.tried, prior, strict=True)
        ]


class StepTimes:
    """Nanoseconds of steps by their tokens, of steps without prompts: the median of the last LATEST of a size, and of
    fewer than three the least, so that one stall teaches little."""

    LATEST = 5

    def __init__(self) -> None:
        self._known: dict[int, deque[int]] = {}
        self._sizes: list[int] = []  # in order

    def observe(self, tokens: int, ns: int) -> None:
        if tokens not in self._known:
            insort(self._sizes, tokens)
            self._known[tokens] = deque(maxlen=self.LATEST)
        self._known[tokens].append(ns)

    def largest_tried(self, tokens: int) -> int:
        """The most tokens that may be tried from a step of so many: what is known says too little of far more."""
        known = self._sizes[-1] if self._sizes else 0
        return max(tokens + 1, known + max(2, known // 4))

    def expected_ns(self, first: int, last: int) -> np.ndarray:
        """Of steps of `first` to `last` tokens: between the known ones on a line; beyond them on the line through the
        last two. Nothing known: all alike."""
        sizes = self._sizes
        if not sizes:
            return np.ones(last - first + 1)
        times = [
            float(sorted(known)[len(known) // 2 if len(known) > 2 else 0]) for known in map(self._known.get, sizes)
        ]
        for place in range(1, len(times)):  # a larger step that was faster was luck
            times[place] = max(times[place], times[place - 1])
        asked = np.arange(first, last + 1)
        found = np.interp(asked, sizes, times)
        if last > sizes[-1] and len(sizes) > 1:
            begin = max(0, bisect_left(sizes, sizes[-1] // 2) - 1)
            begin = min(begin, len(sizes) - 2)
            slope = (times[-1] - times[begin]) / (sizes[-1] - sizes[begin])
            found += slope * np.maximum(0, asked - sizes[-1])
        return found


@dataclass(slots=True)
class _Measured:
    """What is known of one request."""

    acceptance: Acceptance
    since_drafts: int = 0  # steps
    probe_after: int = 0  # steps without drafts until it gets one again


class AdaptiveLengths:
    """As many drafts as raise the expected tokens per second of a step. A request that gets none gets one again now and
    then, so that a text that begins to repeat is noticed: after PROBE_STEPS, and twice as long after each failure."""

    FORGET, FORGET_ALL = 0.9, 0.995
    PRIOR, PRIOR_WEIGHT, ALL_WEIGHT = 0.6, 2.0, 8.0  # before anything was verified
    PROBE_STEPS, PROBE_STEPS_AT_MOST = 16, 256
    PROBE_DECISIONS = 16  # after so many, one step tries all drafts of one request
    SHARE = 0.125  # of a new measurement of a time
    DECIDE_STEPS = 8  # a decision holds that long while the batch stays: deciding takes as long as planning a step

    def __init__(self, most: int, *, writes_ahead: bool, follows_steps: bool):
        self.writes_ahead, self.follows_steps = writes_ahead, follows_steps
        self._most = most
        self._all = Acceptance(most, self.FORGET_ALL)
        self._requests: dict[str, _Measured] = {}
        self._times = StepTimes()
        self._gap_ns = [0.0, 0.0]  # between two steps: planned early, and after the commit
        self._draft_ns = 0.0  # of each draft in a row
        self._last_end_ns: int | None = None
        self._last_waited = False
        self._decided: dict[str, int] = {}  # request id → drafts; 0 too
        self._reasons: dict[str, int] = {}  # of those with 0
        self._age = self._holds = 0  # steps since the decision, and until the next one
        self._decisions = 0

    def wanted(self, sampling: Sequence[Request], plan: StepPlan) -> dict[str, int]:
        decided, self._age = self._decided, self._age + 1
        if self._age >= self._holds or len(sampling) != len(decided) or any(r.id not in decided for r in sampling):
            self._decide(sampling)
            self._age = 0
        plan.undrafted |= self._reasons
        return {request_id: count for request_id, count in self._decided.items() if count}

    def _decide(self, sampling: Sequence[Request]) -> None:
        self._decided, self._reasons, self._holds = {}, {}, self.DECIDE_STEPS
        if not sampling:
            return
        self._decisions += 1
        prior = self._all.rates([self.PRIOR] * self._most, self.ALL_WEIGHT)
        measured = [self._measured(request.id) for request in sampling]
        if len(self._requests) > 2 * len(sampling) + 64:  # mostly of requests that ended
            self._requests = {request.id: self._requests[request.id] for request in sampling}
        rates = np.array([each.acceptance.rates(prior, self.PRIOR_WEIGHT) for each in measured])
        added = np.cumprod(rates, axis=1)  # tokens that each draft adds: falls from position to position
        counts = self._best(added).tolist()
        probed = self._decisions % self.PROBE_DECISIONS == 0 and max(counts) > 0
        if probed:  # a step time that was measured once, on a bad day, would keep drafts away for good
            counts[int(np.argmax(added[:, 0]))] = self._most
        for request, each, own, count in zip(sampling, measured, added, counts, strict=True):
            self._decided[request.id] = count
            if count:
                continue
            each.since_drafts += self._age
            each.probe_after = each.probe_after or self.PROBE_STEPS
            if each.since_drafts >= each.probe_after and not probed:
                probed = True
                each.since_drafts, each.probe_after = 0, min(2 * each.probe_after, self.PROBE_STEPS_AT_MOST)
                self._decided[request.id] = 1
                continue
            reason = NOT_WORTH if own[0] > LIKELY else ACCEPTANCE
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
        if probed:
            self._holds = 1

    def observe(self, plan: StepPlan, outcome: StepOutcome) -> None:
        tokens = 0
        for item in plan.scheduled:
            tokens += item.new_tokens
            if item.drafts:
                self._observe_drafts(item.request.id, len(item.drafts), outcome)
        if plan.wanted and outcome.draft_ns:
            each_ns = outcome.draft_ns / max(plan.wanted.values())
            self._draft_ns += self.SHARE * (each_ns - self._draft_ns)
        if not any(item.is_prompt for item in plan.scheduled):
            self._times.observe(tokens, outcome.device_ns)
        self._observe_gap(plan, outcome)

    def _measured(self, request_id: str) -> _Measured:
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = _Measured(Acceptance(self._most, self.FORGET))
        return known

    def _observe_drafts(self, request_id: str, num_drafts: int, outcome: StepOutcome) -> None:
        accepted = len(outcome.sampled.get(request_id, (0,))) - 1
        self._all.observe(num_drafts, accepted)
        if (each := self._requests.get(request_id)) is not None:
            each.acceptance.observe(num_drafts, accepted)
            if accepted:
                each.probe_after = each.since_drafts = 0

    def _observe_gap(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if self._last_end_ns is not None:
            known = self._gap_ns[self._last_waited]
            gap_ns = max(0, outcome.device_begin_ns - self._last_end_ns)
            gap_ns = min(gap_ns, 2 * known) if known else min(gap_ns, outcome.device_ns)  # else it was idle
            self._gap_ns[self._last_waited] = known + self.SHARE * (gap_ns - known) if known else gap_ns
        self._last_end_ns, self._last_waited = outcome.device_end_ns + outcome.draft_ns, plan.needs_commit

    def _best(self, added: np.ndarray) -> np.ndarray:
        """Drafts of each request [requests], by what each draft adds [requests, most]."""
        requests, most = added.shape
        order = np.argsort(-added, axis=None, kind="stable")
        largest = self._times.largest_tried(requests)
        order = order[: largest - requests]
        count = len(order)
        tokens = requests + np.concatenate(([0.0], np.cumsum(added.flat[order])))
        times = self._times.expected_ns(requests, requests + count)
        times[0] += self._gap_ns[False] or self._gap_ns[True]
        times[1:] += self._gap_ns[True] or self._gap_ns[False]
        chain = np.maximum.accumulate(order % most + 1)
        times[1:] += self._draft_ns * chain
        best = int(np.argmax(tokens / times))
        return np.bincount(order[:best] // most, minlength=requests)
