"""The largest load that a simulated server serves within its objectives: rates of an open load, slots of a closed one.

One trial simulates the load at one rate. The search probes upwards from what a full server gives, then bisects.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay.device.estimate import DeviceEstimate
from sojourn.replay.device.simulate import Load, Simulated, simulate
from sojourn.replay.outcome import Answers, figures
from sojourn.replay.sizing.load import SizedLoad

STEP = 1.5  # of probing
TOLERANCE = 0.03  # of the rate, at the end of a search
MOST_TRIALS = 12
LEFT_WAITING = 0.05  # of all requests: as many that have not begun at the last arrival are a backlog
FEWEST_WAITING = 4
TO_FILL = 6  # times as many requests as are served at a time: then most of a trial is the steady state
FEWEST, MOST_TOKENS = 300, 400_000  # requests of a trial at least, and tokens of its answers at most
SLOT_SENDS = 4  # requests or sessions of each slot
WARM = 0.2  # of the requests, which find a server emptier than it stays

Objectives = Sequence[Mapping[str, Any]]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation. Latencies are ms by quantile: p50, p90, p99."""

    rate_rps: float | None  # None: a closed loop
    slots: int | None
    requests: int
    attainment: float
    keeps_up: bool
    served_rps: float
    output_tokens_per_s: float
    in_flight: float  # on average; of an open load that is kept, by its rate
    most_running: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    mean_e2e_ms: float
    mean_tpot_ms: float
    hit_rate: float  # of prompt tokens
    preemptions: int
    steps: int
    device_share: float  # of the time the device computes
    answers_long: float  # time in which requests came, by the mean time of an answer: a few, or it was no steady state

    def is_kept(self, share: float) -> bool:
        return self.keeps_up and self.attainment >= share


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: the trials that bracket the limit, and all others."""

    kept: Trial | None  # the largest load that keeps the share; None: not even the smallest one
    missed: Trial | None  # the smallest load that does not; None: no load that was tried
    trials: list[Trial]


class Server:
    """A deployment under one load. Owns its trials, so that none is made twice."""

    def __init__(
        self, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad, objectives: Objectives | None,
        *, at_a_time: float | None = None, limit: TimeLimit | None = None,
    ) -> None:  # fmt: skip
        """`at_a_time`: requests that are expected in flight at the limit; by default those of a full server."""
        self.estimate, self.config = estimate, config
        self._objectives, self._limit = objectives, limit
        self._whole = self._load = load
        self._known: dict[float, Trial] = {}
        if at_a_time is None:
            at_a_time = self.full.most_running
        most = max(FEWEST, MOST_TOKENS / load.mean_output)
        wanted = TO_FILL * min(at_a_time, self.config.max_num_seqs)
        self._load = load.first(int(min(most, max(FEWEST, wanted), len(load))))

    @cached_property
    def full(self) -> Trial:
        """Of a full server: some requests, all at once."""
        known, self._load = self._load, self._whole.first(FEWEST)
        try:
            return self._simulated(math.inf, len(self._load))
        finally:
            self._load = known

    @property
    def load(self) -> SizedLoad:
        return self._whole

    @property
    def requests(self) -> int:
        return len(self._load)

    def at_rate(self, rate_rps: float) -> Trial:
        if rate_rps not in self._known:
            self._known[rate_rps] = self._simulated(rate_rps, None)
        return self._known[rate_rps]

    def at_slots(self, slots: int) -> Trial:
        """With so many slots of a closed loop, each of which sends several requests or sessions."""
        if slots not in self._known:
            self._load = self._whole.heads(max(SLOT_SENDS * slots, FEWEST // 4))
            self._known[slots] = self._simulated(None, slots)
        return self._known[slots]

    @property
    def most_slots(self) -> int:
        """For which the load has requests enough."""
        return max(1, int((self._whole.follows < 0).sum()) // SLOT_SENDS)

    def _simulated(self, rate_rps: float | None, slots: int | None) -> Trial:
        load, closed = self._load, rate_rps is None
        due_s = None
        if rate_rps is not None:
            due_s = np.zeros(len(load)) if math.isinf(rate_rps) else load.due_s(rate_rps)
        done = simulate(
            self.estimate,
            Load(
                prompt_tokens=load.prompt_tokens,
                output_tokens=load.output_tokens,
                due_ns=None if due_s is None else due_s * 1e9,
                concurrency=slots if closed else None,
                follows=load.follows if closed else None,
                pause_ns=load.pause_s * 1e9 if closed else None,
                hashes=load.hashes(self.config.block_size),
            ),
            self.config,
            self._limit,
        )
        return self._judged(done, rate_rps, slots if closed else None)

    def _judged(self, done: Simulated, rate_rps: float | None, slots: int | None) -> Trial:
        answers = replace(done.answers, klass=self._load.klass)
        warm = answers.due_ns < np.quantile(answers.due_ns, WARM)
        found = figures(_without(answers, warm), self._objectives, None)
        last_due_ns = answers.due_ns.max()
        waiting = int((answers.due_ns + 1e6 * np.nan_to_num(answers.ttft_ms, nan=np.inf) > last_due_ns).sum())
        served = int(answers.served.sum())
        span_s = done.span_ns / 1e9
        keeps_up = slots is not None or waiting <= max(FEWEST_WAITING, LEFT_WAITING * len(answers.due_ns))
        tokens_per_s = found["output_tokens_per_s"]
        in_flight = float(np.nansum(answers.e2e_ms)) / 1e3 / span_s if span_s > 0 else math.nan
        if keeps_up and rate_rps is not None and math.isfinite(rate_rps):  # else the last answers' drain counts as time
            tokens_per_s = rate_rps * float(answers.output_tokens.mean())
            in_flight = rate_rps * float(np.nansum(answers.e2e_ms)) / 1e3 / len(answers.e2e_ms)
        quantiles = {
            latency: {label.partition(":")[2]: value for label, value in found.items() if label.startswith(latency)}
            for latency in ("ttft_ms", "tpot_ms", "e2e_ms")
        }
        return Trial(
            rate_rps=None if rate_rps is None or math.isinf(rate_rps) else rate_rps,
            slots=slots,
            requests=len(answers.due_ns),
            attainment=found["attainment"],
            keeps_up=keeps_up,
            served_rps=served / span_s if span_s > 0 else math.nan,
            output_tokens_per_s=tokens_per_s,
            in_flight=in_flight,
            most_running=done.most_running,
            mean_e2e_ms=float(np.nanmean(answers.e2e_ms)) if served else math.nan,
            mean_tpot_ms=float(np.nanmean(answers.tpot_ms)) if answers.tpot_counts.any() else math.nan,
            hit_rate=done.cached_tokens / max(1, int(self._load.prompt_tokens.sum())),
            preemptions=done.preemptions,
            steps=done.steps,
            answers_long=float(last_due_ns - answers.due_ns.min()) / 1e6 / float(np.nanmean(answers.e2e_ms)),
            device_share=done.device_ns / done.span_ns if done.span_ns > 0 else math.nan,
            **quantiles,
        )


def _without(answers: Answers, left_out: np.ndarray) -> Answers:
    kept = {each.name: getattr(answers, each.name)[~left_out] for each in fields(answers)}
    return replace(answers, **kept)


def largest_rate(server: Server, share: float, start_rps: float, tolerance: float = TOLERANCE) -> Limit:
    """The largest rate at which at least `share` of the requests keep their objectives and no backlog grows."""
    return _searched(server.at_rate, share, start_rps, tolerance)


def largest_slots(server: Server, share: float, start: int, tolerance: float = 0.0) -> Limit:
    """... the most slots of a closed loop."""
    most = server.most_slots
    return _searched(lambda slots: server.at_slots(round(slots)), share, float(min(start, most)), tolerance, most=most)


def _searched(
    run: Callable[[float], Trial], share: float, start: float, tolerance: float, *, most: int | None = None
) -> Limit:
    """`most`: values are whole numbers up to it."""
    whole = most is not None
    trials: list[Trial] = []
    low: float | None = None
    high: float | None = None
    kept: Trial | None = None
    missed: Trial | None = None
    value = start
    while len(trials) < MOST_TRIALS:
        trial = run(value)
        trials.append(trial)
        if trial.is_kept(share):
            low, kept = value, trial
        else:
            high, missed = value, trial
        if low is not None and high is not None and (high / low <= 1 + tolerance or (whole and high - low <= 1)):
            break
        if whole and (high == 1 or low == most):
            break
        value = _next(low, high, value, whole=whole)
        value = value if most is None else min(value, float(most))
    return Limit(kept=kept, missed=missed, trials=trials)


def _next(low: float | None, high: float | None, now: float, *, whole: bool) -> float:
    if low is None:
        wanted = now / (2.0 if whole else STEP)
        return max(1.0, math.floor(wanted)) if whole else wanted
    if high is None:
        return math.ceil(now * 2) if whole else now * STEP
    return float(round((low + high) / 2)) if whole else math.sqrt(low * high)
