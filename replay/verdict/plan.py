"""Which settings serve most within the objectives: a search that asks a replay, coarse first, then around the best.

Goodput at the objective is the largest rate at which at least a share of the requests keeps its objectives. The search
changes one setting at a time, at a rate that the best settings so far cannot serve, where a difference shows. Pure.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change, Prediction, Predictor

RATES = tuple(2 ** (step / 2) for step in range(-4, 13))  # of the recorded rate: 0.25 to 64
FRONTIER = (0.5, 0.75, 0.9, 1.0, 1.1, 1.4)  # of the limit of the best settings
FINER = 3  # bisections between two of them: the rate is known within 5%
STRESS = 1.25  # of the best rate so far: settings are compared where the best ones begin to fail
KEEPS_UP = 1.1  # of the time that a load takes without a queue: served in more, its queue grew
LEAST_GAIN = 0.01  # of the goodput: less is the noise of a replay
ROUNDS = 2  # over all settings
DOUBTFUL = 0.9  # what goodput counts for if its replay is not trusted
A_LIMIT = 6  # replays that the largest rate of some settings takes, roughly


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search is."""

    doing: str  # what is replayed now
    replays: int
    of_about: int  # replays in all: an estimate, since each step of the search depends on the last
    left_s: float | None  # None before the first replay
    best: "Point | None"  # the largest rate that keeps the objectives so far, and its settings


OnProgress = Callable[[Progress], None]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Settings at a rate, as the replay sees them."""

    settings: dict[str, Any]
    rate: float  # of the recorded rate
    prediction: Prediction
    keeps_up: bool = True  # all answers come nearly as fast as the load does

    @property
    def goodput_rps(self) -> float:
        return self.prediction.goodput_rps.median

    @property
    def attainment(self) -> float:
        return self.prediction.attainment.median


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """An open load: conversations, and requests alone, in the order in which they came."""

    begins_s: list[float]  # from the first one
    lasts_s: list[float]  # from its begin to its last byte: with the pauses of a conversation, without a queue
    output_tokens: float

    def ends_s(self, rate: float) -> float:
        """When its last byte comes at a multiple of its rate, if nothing waits."""
        return max(begin / rate + lasts for begin, lasts in zip(self.begins_s, self.lasts_s, strict=True))


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found."""

    recorded: list[Point]  # the settings of the run, at several rates
    best: list[Point]  # the best settings, at the same rates and at their limit
    recorded_limit: Point | None  # the largest rate that keeps the objectives; None: no rate does
    best_limit: Point | None
    purchases: dict[str, Point | None]  # what is bought → the limit with it
    tried: dict[str, list[Point]]  # what is bought → all replays of it
    replays: int
    is_closed: bool  # the load has no rate: settings are compared at what was recorded
    is_partial: bool = False  # it was stopped: the best so far, and no more

    @property
    def settings(self) -> dict[str, Any]:
        return self.best[0].settings if self.best else {}


class Search:
    """Owns the replays of one run, so that none is made twice."""

    def __init__(
        self, predictor: Predictor, objectives: Sequence[Mapping[str, Any]] | None, attainment: float,
        load: Load | None, progress: OnProgress = lambda _: None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Without a load, the clients wait for their answers: there is no rate to change."""
        self._clock, self._spent_s, self._expected, self._doing = clock, 0.0, 0, "the run as it was"
        self._points: dict[bytes, list[Point]] = {}  # a change of the hardware → its points, as they were replayed
        self._bought: dict[str, Point | None] = {}
        self._tried: dict[str, list[Point]] = {}
        self._found: Point | None = None
        self.predictor = predictor
        self.objectives = objectives
        self.attainment = attainment
        self.replays = 0
        self._load = load
        self._is_closed = load is None
        self._progress = progress
        self._known: dict[bytes, Prediction] = {}

    def run(self, candidates: Mapping[str, Sequence[Any]], purchases: Mapping[str, Change]) -> Planned:
        """Searches the settings named in `candidates`, coarse values first. Ctrl-C ends it with the best so far, once
        there is one. Raises ReplayError."""
        tried = sum(len(values) + 1 for values in candidates.values())
        self._expected = tried + (2 + len(candidates) // 2 + len(purchases)) * A_LIMIT + 2 * len(FRONTIER)
        try:
            return self._run(candidates, purchases)
        except KeyboardInterrupt:
            if not self._points:
                raise
            return self._best_so_far()

    def _best_so_far(self) -> Planned:
        def limit(points: Sequence[Point]) -> Point | None:
            return max((each for each in points if self.is_kept(each)), key=lambda each: each.rate, default=None)

        points = self._points[_key(Change())]
        recorded = sorted((each for each in points if not each.settings), key=lambda each: each.rate)
        recorded_limit, best_limit = limit(recorded), self._found or limit(recorded)
        chosen = best_limit.settings if best_limit is not None else {}
        best = sorted((each for each in points if each.settings == chosen), key=lambda each: each.rate)
        return Planned(
            recorded=recorded, best=best, recorded_limit=recorded_limit, best_limit=best_limit, purchases=self._bought,
            tried=self._tried, replays=self.replays, is_closed=self._is_closed, is_partial=True,
        )  # fmt: skip

    def _run(self, candidates: Mapping[str, Sequence[Any]], purchases: Mapping[str, Change]) -> Planned:
        recorded_limit = self._found = self.limit({})
        best, limit = self._best(candidates, recorded_limit)
        top = limit.rate if limit is not None else 1.0
        rates = [1.0] if self._is_closed else [share * top for share in FRONTIER]
        bought = {} if self._is_closed else self._purchases(best, top, purchases)
        return Planned(
            recorded=self.points([{}] * len(rates), rates),
            best=self.points([best] * len(rates), rates),
            recorded_limit=recorded_limit,
            best_limit=limit,
            purchases=bought,
            tried=self._tried,
            replays=self.replays,
            is_closed=self._is_closed,
        )

    def limit(self, settings: dict[str, Any], change: Change = Change(), start: float = 1.0) -> Point | None:
        """The largest rate at which the objectives are kept: by steps, then by bisection. None: not even the least."""
        if self._is_closed:
            (point,) = self.points([settings], [1.0], change)
            return point if self.is_kept(point) else None
        place = min(range(len(RATES)), key=lambda index: abs(RATES[index] - start))
        kept: Point | None = None
        step = None
        while 0 <= place < len(RATES):
            (point,) = self.points([settings], [RATES[place]], change)
            is_kept = self.is_kept(point)
            if is_kept:
                kept = point
            if step is not None and is_kept != (step > 0):
                break
            step = 1 if is_kept else -1
            place += step
        if kept is None or kept.rate == RATES[-1]:
            return kept
        low, high = kept, kept.rate * 2**0.5
        for _ in range(FINER):
            (point,) = self.points([settings], [(low.rate * high) ** 0.5], change)
            if self.is_kept(point):
                low = point
            else:
                high = point.rate
        return low

    def is_kept(self, point: Point) -> bool:
        """Enough requests keep the objectives, and the server keeps up. At a multiple of its rate a recorded load is
        over before a backlog breaks an objective."""
        return point.attainment >= self.attainment and point.keeps_up

    def _keeps_up(self, said: Prediction, rate: float) -> bool:
        tokens_per_s = said.output_tokens_per_s
        if self._load is None or tokens_per_s <= 0:
            return tokens_per_s > 0
        took_s = self._load.output_tokens / tokens_per_s
        return took_s <= KEEPS_UP * self._load.ends_s(rate)

    def points(
        self, settings: Sequence[dict[str, Any]], rates: Sequence[float], change: Change = Change()
    ) -> list[Point]:
        """Replays, with what is known already left out."""
        changes = [
            msgspec.structs.replace(
                change,
                settings={**each, **change.settings},
                objectives=self.objectives,
                arrival_rate=change.arrival_rate * rate,
            )
            for each, rate in zip(settings, rates, strict=True)
        ]
        keys = [_key(each) for each in changes]
        missing = {key: each for key, each in zip(keys, changes, strict=True) if key not in self._known}
        if missing:
            self._tell()
            begin = self._clock()
            found = self.predictor.predict(list(missing.values()))
            self._spent_s += self._clock() - begin
            self._known |= zip(missing, found, strict=True)
            self.replays += len(missing)
        points = [
            Point(
                settings=each, rate=rate, prediction=self._known[key], keeps_up=self._keeps_up(self._known[key], rate)
            )
            for each, rate, key in zip(settings, rates, keys, strict=True)
        ]
        known = self._points.setdefault(_key(change), [])
        known += [each for each, key in zip(points, keys, strict=True) if key in missing]
        return points

    def _tell(self) -> None:
        left_s = None
        if self.replays:
            left_s = max(0, self._expected - self.replays) * self._spent_s / self.replays
        self._progress(Progress(
            doing=self._doing, replays=self.replays, of_about=max(self._expected, self.replays + 1), left_s=left_s,
            best=self._found,
        ))  # fmt: skip

    def _best(
        self, candidates: Mapping[str, Sequence[Any]], limit: Point | None
    ) -> tuple[dict[str, Any], Point | None]:
        best: dict[str, Any] = {}
        for number in range(ROUNDS):
            before = dict(best)
            for name, values in candidates.items():
                stress = 1.0 if self._is_closed else (limit.rate if limit else RATES[0]) * STRESS
                values = values if number == 0 else around(best.get(name), values)
                self._doing = f"{name} at {stress:.2f} times the recorded rate"
                others = [best] + [best | {name: value} for value in values if best.get(name) != value]
                others = [each for each in others if self._can_replay(each)]
                points = self.points(others, [stress] * len(others))
                winner = max(points[1:], key=merit, default=None)
                if winner is not None and merit(winner) > merit(points[0], 1 + LEAST_GAIN):
                    best = winner.settings
                    limit = self._found = self.limit(best, start=limit.rate if limit else 1.0) or limit
            if best == before:
                break
        return best, self.limit(best, start=limit.rate if limit else 1.0)

    def _can_replay(self, settings: dict[str, Any]) -> bool:
        try:
            self.predictor.check(Change(settings=settings))
        except ReplayError:
            return False
        return True

    def _purchases(self, best: dict[str, Any], top: float, purchases: Mapping[str, Change]) -> dict[str, Point | None]:
        for name, change in purchases.items():
            self._doing = name
            self._bought[name] = self.limit(best, change, start=top)
            self._tried[name] = self._points[_key(change)]
        return self._bought


def _key(change: Change) -> bytes:
    return msgspec.json.encode(change, order="sorted")


def merit(point: Point, factor: float = 1.0) -> tuple[float, float]:
    """Good requests a second of the time until the last answer; then output tokens a second, which are tokens per
    dollar on one machine."""
    tokens_per_s = point.prediction.output_tokens_per_s
    trust = 1.0 if point.prediction.is_trusted else DOUBTFUL
    return factor * trust * point.attainment * tokens_per_s, factor * tokens_per_s


def around(value: Any, values: Sequence[Any]) -> list[Any]:
    """Numbers halfway to the neighbours of the best one; of words, and of a setting that stays, none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return []
    return sorted({max(1, round(value / 2**0.5)), round(value * 2**0.5)} - {value, *values})


def usd_per_million_tokens(dollars_per_hour: float, tokens_per_s: float) -> float | None:
    """What a million output tokens cost on one machine that serves so many a second."""
    return dollars_per_hour / 3600 / tokens_per_s * 1e6 if tokens_per_s > 0 else None
