"""The largest load that a simulated server serves within its objectives: rates of an open load, slots of a closed one.

One trial simulates the load at one rate. A server whose every step takes twice as long serves half the rate, in twice
the time: the same simulation by a slower clock. So the limits of slower and faster servers share their trials.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.metrics.time_limit import TimeLimit
from sojourn.replay.device.estimate import DeviceEstimate
from sojourn.replay.device.simulate import Load, Simulated, simulate
from sojourn.replay.outcome import Answers, figures, within
from sojourn.replay.sizing.corrected import CorrectedEstimate, Correction
from sojourn.replay.sizing.load import SizedLoad
from sojourn.replay.sizing.search import Tried, search

TOLERANCE = 0.03  # of the rate, at the end of a search
MOST_MARGIN, HALVINGS = 64.0, 24  # of a margin, and of its search
LEFT_WAITING = 0.05  # of all requests: as many that have not begun at the last arrival are a backlog
FEWEST_WAITING = 4
TO_FILL = 6  # times as many requests as are served at a time: then most of a trial is the steady state
FEWEST, MOST_TOKENS = 300, 400_000  # requests of a trial at least, and tokens of its answers at most
SLOT_SENDS = 4  # requests or sessions of each slot
FEWEST_ANSWERS = 2.0  # as long as requests must come: sooner, a server never holds as many as it would
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
    is_whole: bool = False  # the load has no more requests than these

    @property
    def is_too_short(self) -> bool:
        """The load has too few requests for this rate, so that the trial says nothing of it."""
        return self.is_whole and self.slots is None and not self.answers_long >= FEWEST_ANSWERS

    def is_kept(self, share: float) -> bool:
        return self.keeps_up and self.attainment >= share and not self.is_too_short


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: the trials that bracket the limit, and all others."""

    kept: Trial | None  # the largest load that keeps the share; None: not even the smallest one
    missed: Trial | None  # the smallest load that does not; None: no load that was tried and says something
    trials: list[Trial]
    ends_early: bool = False  # where the load has too few requests, not where the server fails


class _Made(NamedTuple):
    """A simulation, and the requests it was of."""

    load: SizedLoad
    done: Simulated


class Server:
    """A deployment under one load. Owns its simulations, so that none is made twice."""

    def __init__(
        self, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad, objectives: Objectives | None,
        *, at_a_time: float | None = None, limit: TimeLimit | None = None,
    ) -> None:  # fmt: skip
        """`at_a_time`: requests that are expected in flight at the limit; by default those of a full server."""
        self.estimate, self.config = estimate, config
        self._objectives, self._limit = objectives, limit
        self._whole = self._load = load
        self._made: dict[tuple[float, bool], _Made] = {}  # by rate, or by slots of a closed loop
        self._clock = 1.0  # how many times as long everything takes as in the simulations
        if at_a_time is None:
            at_a_time = self.full.most_running
        most = max(FEWEST, MOST_TOKENS / load.mean_output)
        wanted = TO_FILL * min(at_a_time, self.config.max_num_seqs)
        self._load = load.first(int(min(most, max(FEWEST, wanted), len(load))))

    @cached_property
    def full(self) -> Trial:
        """Of a full server: some requests, all at once."""
        return self._judged(self._simulated(self._whole.first(FEWEST), math.inf, closed=False), None, None)

    @property
    def load(self) -> SizedLoad:
        return self._whole

    @property
    def requests(self) -> int:
        return len(self._load)

    def slower(self, factor: float) -> "Server":
        """This one if every step takes `factor` times as long, its host's part as well."""
        if not self._whole.pause_s.any():  # the pauses of sessions stay as long as they are
            other = copy.copy(self)
            other._clock = self._clock * factor
            return other
        host_ns = self.estimate.host_ns * factor
        estimate = CorrectedEstimate(self.estimate, Correction(decode=factor, prompt=factor, host_ns=host_ns))
        return Server(
            estimate, self.config, self._whole, self._objectives, at_a_time=self.requests / TO_FILL, limit=self._limit
        )  # fmt: skip

    def at_rate(self, rate_rps: float) -> Trial:
        return self.trial(rate_rps, closed=False)

    def at_slots(self, slots: int) -> Trial:
        """With so many slots of a closed loop, each of which sends several requests or sessions."""
        return self.trial(slots, closed=True)

    def trial(self, value: float, *, closed: bool) -> Trial:
        """At a rate, or with slots."""
        made = self._made_at(value, closed=closed)
        return self._judged(made, None if closed else value, round(value) if closed else None)

    def tried(self, value: float, share: float, *, closed: bool) -> Tried:
        """What a trial says to a search: its margin by halving, how many times as long each answer may take."""
        trial = self.trial(value, closed=closed)
        is_kept = trial.is_kept(share)
        answers = self._answers(self._made_at(value, closed=closed))
        answers = _without(answers, _warm(answers))
        low, high = 1 / MOST_MARGIN, MOST_MARGIN
        for _ in range(HALVINGS):
            middle = math.sqrt(low * high)
            is_within = within(answers.stretched(middle), self._objectives).mean() >= share
            low, high = (middle, high) if is_within else (low, middle)
        is_of_limit = is_kept == (low >= 1) and low > 1 / MOST_MARGIN and high < MOST_MARGIN
        margin = math.sqrt(low * high) if is_of_limit else math.nan
        return Tried(value, is_kept, margin, value <= 1 if closed else trial.in_flight <= 1)

    def simulated(self, *, closed: bool) -> list[float]:
        """The rates, or the slots, that were simulated."""
        return [value / (1 if closed else self._clock) for value, is_closed in self._made if is_closed == closed]

    @property
    def most_slots(self) -> int:
        """For which the load has requests enough."""
        return max(1, int((self._whole.follows < 0).sum()) // SLOT_SENDS)

    def _made_at(self, value: float, *, closed: bool) -> _Made:
        own = round(value) if closed else float(f"{value * self._clock:.12g}")  # by the clock of the simulations
        if (own, closed) not in self._made:
            load = self._whole.heads(max(SLOT_SENDS * round(own), FEWEST // 4)) if closed else self._load
            self._made[own, closed] = self._simulated(load, own, closed=closed)
        return self._made[own, closed]

    def _simulated(self, load: SizedLoad, value: float, *, closed: bool) -> _Made:
        due_s = None
        if not closed:
            due_s = np.zeros(len(load)) if math.isinf(value) else load.due_s(value)
        done = simulate(
            self.estimate,
            Load(
                prompt_tokens=load.prompt_tokens,
                output_tokens=load.output_tokens,
                due_ns=None if due_s is None else due_s * 1e9,
                concurrency=round(value) if closed else None,
                follows=load.follows if closed else None,
                pause_ns=load.pause_s * 1e9 if closed else None,
                hashes=load.hashes(self.config.block_size),
            ),
            self.config,
            self._limit,
        )
        return _Made(load, done)

    def _answers(self, made: _Made) -> Answers:
        """By this server's clock."""
        answers = replace(made.done.answers, klass=made.load.klass)
        answers = answers.stretched(self._clock)
        moved = (self._clock - 1) * made.done.answers.due_ns
        return replace(answers, due_ns=answers.due_ns + moved, last_ns=answers.last_ns + moved)

    def _judged(self, made: _Made, rate_rps: float | None, slots: int | None) -> Trial:
        done, answers = made.done, self._answers(made)
        warm = _warm(answers)
        found = figures(_without(answers, warm), self._objectives, None)
        last_due_ns = answers.due_ns.max()
        waiting = int((answers.due_ns + 1e6 * np.nan_to_num(answers.ttft_ms, nan=np.inf) > last_due_ns).sum())
        served = int(answers.served.sum())
        span_s = self._clock * done.span_ns / 1e9
        keeps_up = slots is not None or waiting <= max(FEWEST_WAITING, LEFT_WAITING * len(answers.due_ns))
        tokens_per_s = found["output_tokens_per_s"]
        in_flight = float(np.nansum(answers.e2e_ms)) / 1e3 / span_s if span_s > 0 else math.nan
        if keeps_up and rate_rps is not None:  # else the last answers' drain counts as time
            tokens_per_s = rate_rps * float(answers.output_tokens.mean())
            in_flight = rate_rps * float(np.nansum(answers.e2e_ms)) / 1e3 / len(answers.e2e_ms)
        if slots is not None and (steady := _steady(answers, made.load.follows < 0, slots)) is not None:
            tokens_per_s, in_flight = steady
        quantiles = {
            latency: {label.partition(":")[2]: value for label, value in found.items() if label.startswith(latency)}
            for latency in ("ttft_ms", "tpot_ms", "e2e_ms")
        }
        return Trial(
            rate_rps=rate_rps,
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
            hit_rate=done.cached_tokens / max(1, int(made.load.prompt_tokens.sum())),
            preemptions=done.preemptions,
            steps=done.steps,
            answers_long=float(last_due_ns - answers.due_ns.min()) / 1e6 / float(np.nanmean(answers.e2e_ms)),
            is_whole=len(made.load) == len(self._whole),
            device_share=done.device_ns / done.span_ns if done.span_ns > 0 else math.nan,
            **quantiles,
        )


def _without(answers: Answers, left_out: np.ndarray) -> Answers:
    kept = {each.name: getattr(answers, each.name)[~left_out] for each in fields(answers)}
    return replace(answers, **kept)


def _steady(answers: Answers, heads: np.ndarray, slots: int) -> tuple[float, float] | None:
    """Tokens per second of a closed loop, and requests in flight: from the first request that an ended one sent until
    an answer's time before the last of those that follow none (`heads`). Then slots begin to stay empty, and answers
    that go on become faster. None for too short a loop."""
    due = answers.due_ns
    begin, end = (np.sort(due)[slots], due[heads].max()) if slots < len(due) else (0.0, 0.0)
    if not end > begin:
        return None
    end = max((begin + end) / 2, end - 1e6 * float(np.nanmean(answers.e2e_ms)))
    first = due + 1e6 * answers.ttft_ms

    def overlap(since: np.ndarray) -> np.ndarray:
        return np.clip(np.minimum(answers.last_ns, end) - np.maximum(since, begin), 0.0, None)

    streamed = overlap(first) / np.maximum(answers.last_ns - first, 1.0) * (answers.output_tokens - 1)
    tokens = np.nansum(streamed) + ((first > begin) & (first <= end)).sum()
    span_ns = end - begin
    return float(tokens / span_ns) * 1e9, float(np.nansum(overlap(due)) / span_ns)


def _warm(answers: Answers) -> np.ndarray:
    return answers.due_ns < np.quantile(answers.due_ns, WARM)


def largest_rate(server: Server, share: float, start_rps: float, tolerance: float = TOLERANCE) -> Limit:
    """The largest rate at which at least `share` of the requests keep their objectives and no backlog grows. Where the
    server has simulations already, they take the place of `start_rps`."""
    return _found(server, share, start_rps, tolerance, None)


def largest_slots(server: Server, share: float, start: int, tolerance: float = 0.0) -> Limit:
    """... the most slots of a closed loop."""
    most = server.most_slots
    return _found(server, share, float(min(start, most)), tolerance, most)


def _found(server: Server, share: float, start: float, tolerance: float, most: int | None) -> Limit:
    closed, trials = most is not None, []

    def run(value: float) -> Tried:
        trials.append(server.trial(value, closed=closed))
        return server.tried(value, share, closed=closed)

    known = [server.tried(value, share, closed=closed) for value in server.simulated(closed=closed)]
    bracket = search(run, start, tolerance, most=most, known=known)
    kept, missed = (
        None if each is None else server.trial(each.value, closed=closed) for each in (bracket.kept, bracket.missed)
    )
    if missed is not None and missed.is_too_short:
        return Limit(kept=kept, missed=None, trials=trials, ends_early=True)
    tried = (
        [] if missed is not None else [server.trial(value, closed=closed) for value in server.simulated(closed=closed)]
    )
    return Limit(kept=kept, missed=missed, trials=trials, ends_early=any(trial.is_too_short for trial in tried))
