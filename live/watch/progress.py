"""Whether each engine of a page still moves: requests run or wait, and no token, no step and no end comes.

An engine of several is judged by the series that are its own. Where some are, what the engines have together, such as
the tokens of one front, says nothing of it. What this cannot tell: what a single request does, before a first prompt
was ever computed a long prefill from a hang, and engines of a page that has no series by engine but their load.
A page that looks idle is judged by the connections that its clients hold, and afterwards by its times to first token.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from sojourn.interop.sources.counters import EVENTS, Identity, Series, identity
from sojourn.interop.sources.pressure import GAPS, KV_USE, RUNNING, WAITING
from sojourn.interop.sources.scrapes import OPEN_FILES
from sojourn.interop.sources.source import Source, Sum
from sojourn.live.watch.connections import Connections

USUAL, LEAST_S = 10.0, 10.0  # times the usual gap between tokens or the usual prefill, and at least so long
UNSEEN_S, FEWEST_FIRSTS = 15.0, 3  # of an engine that looks idle; first tokens that tell how long they took
FIRST_S = 60.0  # before anything was ever computed: a first long prompt, or a compilation, may take so long
PACE, PACE_S = 3.0, 60.0  # times the longest time without a change while it worked, once it was seen to work so long
LEAST_SCRAPES = 2  # without a change: one may be a page that was rendered late
STALE = 1.5  # times as long as the gauges may stand still, where the last thing seen was an end
PROGRESS = (
    "sojourn_token_scheduled_tokens_total", "sojourn_token_prompt_tokens_total",
    "sojourn_token_generated_tokens_total", "sojourn_request_finished_total",
)  # fmt: skip
TTFT = "sojourn_request_ttft_seconds"
STEPS = ("sojourn_compute_step_seconds", GAPS)
STOOD_S = 3.0  # an engine that moves again after so long had stood still
MOST_STALLS = 20  # that are remembered
GAVE_UP = ("abort", "aborted", "cancelled", "canceled", "error", "disconnected")  # ends that take no engine
ADVICE = "take a stack dump (`py-spy dump --pid PID` of the engine's process, also of its workers), then restart it"


@dataclass(frozen=True, slots=True)
class Still:
    """An engine that has requests and does not move."""

    engine: str  # "" of one that is alone
    since_ns: int
    seconds: float
    limit_s: float  # from which on it counts as stuck
    running: float
    waiting: float
    whole: bool  # since the first scrape: it may have been so before
    unseen: float = 0.0  # connections that stay open at an engine that looks idle
    is_sure: bool = True

    @property
    def is_stuck(self) -> bool:
        return self.seconds >= self.limit_s and self.is_sure

    def sentence(self, when: str) -> str:
        since = f"{'at least ' if self.whole else ''}{self.seconds:.0f} s (since {when}{' or before' * self.whole})"
        if self.unseen:
            opened = f"{self.unseen:,.0f} more connections {'stay' if self.is_sure else 'stayed'} open than before"
            return f"{opened}, and nothing ran or ended for {since}"
        who = f"engine {self.engine} has" if self.engine else "the engine has"
        held = f"{self.running:,.0f} running and {self.waiting:,.0f} waiting requests"
        return f"{who} {held}, and no token, no step and no end came for {since}"

    @property
    def doubt(self) -> str:
        """What else it may be."""
        if self.unseen:
            return "clients that send nothing, or a hang that no gauge shows; a request of your own tells which"
        return f"a long prefill, or a hang; it counts as stuck from {self.limit_s:.0f} s on"


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which an engine that had requests did not move. It is over."""

    engine: str
    begin_ns: int
    end_ns: int
    requests: float  # that ran or waited at its end

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def is_hang(self) -> bool:
        """Longer than a step with a long prompt takes."""
        return self.seconds >= LEAST_S

    def has_just_ended(self, now_ns: int, within_s: float) -> bool:
        """Of a hang: what it delayed is in few figures yet."""
        return self.is_hang and now_ns - self.end_ns < within_s * 1e9

    def sentence(self, until: str) -> str:
        if not self.is_hang:
            who = f"of engine {self.engine} " if self.engine else ""
            return (
                f"No token {who}came for {self.seconds:.0f} s, until {until}, with {self.requests:,.0f} requests: one "
                "long step, or a stall"
            )
        who = f"Engine {self.engine}" if self.engine else "The engine"
        return (
            f"{who} stood still for {self.seconds:.0f} s, until {until}, with {self.requests:,.0f} requests; it moves "
            "again"
        )


@dataclass(slots=True)
class _Pace:
    """Of an engine, as this watch saw it work. A time that counts as a stall is left out: none hides the next."""

    seconds: float = 0.0
    longest_s: float = 0.0  # without a change

    @property
    def limit_s(self) -> float:
        return max(LEAST_S, PACE * self.longest_s) if self.seconds >= PACE_S else math.inf


@dataclass(slots=True)
class _Engine:
    values: dict[Series, float]
    since_ns: int
    scrapes: int = 0
    running: float = 0.0
    waiting: float = 0.0
    ended: bool = False
    has_moved: bool = False
    by_gauges: bool = False  # nothing of its own is counted: gauges may stand still for a time


class Progress:
    """Owns when each engine of a server last moved."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._engines: dict[Identity, _Engine] = {}
        self._values: Mapping[Series, float] = {}
        self._last_ns = 0
        self._stood: dict[Identity, Still] = {}
        self._stalls: deque[Stall] = deque(maxlen=MOST_STALLS)
        self._paces: dict[Identity, _Pace] = {}
        self._quiet: Connections | None = None  # since it last worked

    def add(self, ns: int, source: Source, values: Mapping[Series, float]) -> None:
        if self._source is not source:
            self._source, self._engines, self._quiet = source, {}, None
        self._values, since_s, self._last_ns = values, (ns - self._last_ns) / 1e9, ns
        load = {family: dict(self._by_engine(family)) for family in (RUNNING, WAITING)}
        moving = {series: value for series, value in values.items() if self._tells(series)}
        owners = {series: _owner(source, series[1]) for series in moving}
        seen: dict[Identity, _Engine] = {}
        engines = load[RUNNING].keys() | load[WAITING].keys()
        moved: set[Series] = set()
        for engine in engines:
            own = _own(engine, engines, moving, owners)
            if not own:
                continue
            running, waiting = load[RUNNING].get(engine, 0.0), load[WAITING].get(engine, 0.0)
            before = self._engines.get(engine)
            changed = self._changed(engine, own, ns)
            moved |= changed
            self._note_pace(engine, ns, since_s, bool(changed))
            busy = running + waiting > 0
            if before is None or changed or not busy or before.running + before.waiting <= 0:
                ends = _names(source, ("sojourn_request_finished_total",))
                ended = any(name in ends for name, _ in changed)
                by_gauges = not any(name.endswith(("_total", "_count")) for name, _ in own)
                seen[engine] = _Engine(own, ns, 0, running, waiting, ended, before is not None, by_gauges)
            else:
                before.values |= own
                before.scrapes, before.running, before.waiting = before.scrapes + 1, running, waiting
                seen[engine] = before
        self._engines = seen
        self._stood = {engine: still for engine in seen if (still := self._still(engine, STOOD_S)) and still.is_stuck}
        self._note_quiet(ns, bool(moved) or any(each.running + each.waiting > 0 for each in seen.values()))

    def _note_pace(self, engine: Identity, ns: int, since_s: float, changed: bool) -> None:
        before = self._engines.get(engine)
        if before is None or before.running + before.waiting <= 0:
            return
        gap_s = (ns - before.since_ns) / 1e9
        if engine in self._stood and gap_s >= LEAST_S:
            return
        pace = self._paces.setdefault(engine, _Pace())
        pace.seconds += since_s
        pace.longest_s = max(pace.longest_s, gap_s) if changed else pace.longest_s

    def _note_quiet(self, ns: int, works: bool) -> None:
        """Follows what stays open while nothing moves. Of first tokens that come then, the page knows how long they
        took: a hang that no gauge showed is known when it is over."""
        quiet = self._quiet
        files = [value for (name, _), value in self._values.items() if name == OPEN_FILES]
        if not works:
            if quiet is None or quiet.ended_ns is not None:
                quiet = self._quiet = Connections(ns, self._firsts(), *(files or [0.0])[:1])
            quiet.add(ns, files[0] if len(files) == 1 else 0.0)
            return
        if quiet is None:
            return
        if any(each.is_stuck for each in self._unseen(ns)):
            self._stalls.append(Stall("", quiet.since_ns, ns, quiet.more))
            self._quiet = None
            return
        quiet.ended_ns = ns if quiet.ended_ns is None else quiet.ended_ns
        seconds, number = (now - then for now, then in zip(self._firsts(), quiet.firsts, strict=True))
        within_s = (ns - quiet.ended_ns) / 1e9  # since it works, which is no part of the hang
        stood_s = seconds / number - within_s if number >= FEWEST_FIRSTS else 0.0
        limit_s = min((self._limit_s(engine, STOOD_S) for engine in self._engines), default=FIRST_S)
        if stood_s >= limit_s:
            begin_ns = max(quiet.since_ns, quiet.ended_ns - int(2e9 * stood_s))  # some came first, and some last
            self._stalls.append(Stall("", begin_ns, quiet.ended_ns, number))
        if number >= FEWEST_FIRSTS or within_s >= STOOD_S:
            self._quiet = None

    def _firsts(self) -> tuple[float, float]:
        """Seconds to first tokens, and their number."""
        names = _names(self._source, (TTFT,))
        return tuple(
            sum(value for (name, _), value in self._values.items() if name in {f"{each}_{part}" for each in names})
            for part in ("sum", "count")
        )

    def _changed(self, engine: Identity, own: Mapping[Series, float], ns: int) -> set[Series]:
        """What moved since the scrape before. A hung engine that moves again has a stall behind it."""
        before = self._engines.get(engine)
        if before is None:
            return set()
        changed = {series for series, value in own.items() if before.values.get(series, value) != value}
        if changed and (stood := self._stood.get(engine)) is not None:
            self._stalls.append(Stall(stood.engine, stood.since_ns, ns, stood.running + stood.waiting))
        return changed

    def stalls(self) -> list[tuple[int, int]]:
        """Begin and end of those that are over."""
        return [(each.begin_ns, each.end_ns) for each in self._stalls]

    def stall(self, since_ns: int) -> Stall | None:
        """The last whose requests may be among those that were counted since a moment. Its backlog is taken to need as
        long as it took."""
        ends = ((each, 2 * each.end_ns - each.begin_ns) for each in reversed(self._stalls))
        return next((each for each, end_ns in ends if end_ns >= since_ns), None)

    def still(self) -> list[Still]:
        """The engines that have requests and did not move for a time that is worth a word, longest first."""
        found = [still for engine in self._engines if (still := self._still(engine)) is not None]
        return sorted(found, key=lambda each: -each.seconds) or list(self._unseen(self._last_ns))

    def _unseen(self, ns: int) -> Iterator[Still]:
        quiet = self._quiet
        if quiet is None or quiet.ended_ns is not None:
            return
        seconds = (ns - quiet.since_ns) / 1e9
        if seconds >= LEAST_S and quiet.are_some:
            yield Still("", quiet.since_ns, seconds, UNSEEN_S, 0.0, 0.0, whole=False,
                        unseen=max(quiet.most, quiet.more), is_sure=quiet.are_many)  # fmt: skip

    def _still(self, engine: Identity, least_s: float = LEAST_S) -> Still | None:
        each = self._engines[engine]
        seconds = (self._last_ns - each.since_ns) / 1e9
        if each.scrapes < LEAST_SCRAPES or seconds < least_s or each.running + each.waiting <= 0:
            return None
        limit = self._limit_s(engine, least_s)
        if each.ended or each.by_gauges:
            limit = max(limit, STALE * self._source.stands_s)
        name = ", ".join(value for _, value in sorted(engine - self._shared())) if len(self._engines) > 1 else ""
        return Still(name, each.since_ns, seconds, limit, each.running, each.waiting, not each.has_moved)

    def _limit_s(self, engine: Identity, least_s: float) -> float:
        usual_s, pace = self._usual_s(engine), self._paces.get(engine)
        if usual_s is None:
            return FIRST_S
        return max(least_s, min(USUAL * usual_s, pace.limit_s if pace is not None else math.inf))

    def _shared(self) -> Identity:
        return frozenset.intersection(*self._engines)

    def _tells(self, series: Series) -> bool:
        name, labels = series
        source = self._source
        if name in _names(source, PROGRESS):
            return not any(value in GAVE_UP for _, value in labels)
        counts = {f"{each}_count" for each in _names(source, STEPS)}
        return name in counts or name in source.steps or name in _names(source, (KV_USE,))

    def _by_engine(self, family: str) -> Iterator[tuple[Identity, float]]:
        there = {name for name, _ in self._values}
        alternatives = [terms for item in self._source.translations if item.ours == family for terms in item.theirs]
        terms = next((terms for terms in alternatives if all(term.name in there for term in terms)), ())
        names = {term.name for term in terms}
        chosen = [
            (labels, term.sign * value)
            for (name, labels), value in self._values.items()
            if name in names
            for term in terms
            if term.name == name and term.holds(dict(labels))
        ]
        speaks = self._source.counted([dict(labels) for labels, _ in chosen])
        found: dict[Identity, float] = {}
        for (labels, value), counts in zip(chosen, speaks, strict=True):
            if counts:
                engine = _owner(self._source, labels)
                found[engine] = found.get(engine, 0.0) + value
        yield from found.items()

    def _usual_s(self, engine: Identity) -> float | None:
        """The mean gap between tokens or the mean prefill since the engine began, whichever is longer."""
        prefill = next((span for span in self._source.spans if "compute.prefill" in span.accounts), None)
        means = [*self._means_of(GAPS, engine)]
        if prefill is not None:
            means.append(self._mean(prefill.seconds, prefill.requests, engine))
        known = [mean for mean in means if mean is not None]
        if not known:  # a time to first token holds the wait in the line, too
            known = [mean for mean in self._means_of(TTFT, engine) if mean is not None]
        return max(known, default=None)

    def _means_of(self, family: str, engine: Identity) -> Iterator[float | None]:
        terms = {term for item in self._source.translations if item.ours == family for sum_ in item.theirs
                 for term in sum_}  # fmt: skip
        for term in terms:
            seconds = replace(term, name=f"{term.name}_sum")
            yield self._mean((seconds,), (replace(term, name=f"{term.name}_count", scale=1.0),), engine)

    def _mean(self, seconds: Sum, requests: Sum, engine: Identity) -> float | None:
        total, count = self._total(seconds, engine), self._total(requests, engine)
        return total / count if count else None

    def _total(self, terms: Sum, engine: Identity) -> float:
        return sum(
            term.scale * value for (name, labels), value in self._values.items()
            for term in terms
            if name == term.name and term.sign > 0 and term.holds(dict(labels))
            and _owner(self._source, labels) <= engine
        )  # fmt: skip


def _own(
    engine: Identity, engines: Collection[Identity], moving: Mapping[Series, float], owners: Mapping[Series, Identity]
) -> dict[Series, float]:
    """What tells whether an engine moves: its own series, else those that it shares with others."""
    shared = {series: value for series, value in moving.items() if owners[series] <= engine}
    others = [other for other in engines if other != engine]
    own = {series: value for series, value in shared.items() if not any(owners[series] <= other for other in others)}
    return own or shared


def _owner(source: Source, labels: Iterable[tuple[str, str]]) -> Identity:
    return identity(pair for pair in labels if pair[0] not in source.rank_labels and pair[0] not in EVENTS)


def _names(source: Source, ours: tuple[str, ...]) -> frozenset[str]:
    """The names that the terms of these translations have. Asked of each series of a page: they are found once."""
    known = _KNOWN_NAMES.setdefault(source.key, {})
    if ours not in known:
        terms = [term for item in source.translations if item.ours in ours for terms in item.theirs for term in terms]
        known[ours] = frozenset(term.name for term in terms)
    return known[ours]


_KNOWN_NAMES: dict[str, dict[tuple[str, ...], frozenset[str]]] = {}
