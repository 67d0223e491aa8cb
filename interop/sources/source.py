"""What a server's /metrics shows, in our words. A source is data, read from the server's own code.

It maps samples to families of `metrics.catalog`, names the stretches of a request's time that the server measures, and
says of each account of the ledger whether it can be seen there, and why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Visibility = Literal["seen", "partly", "unseen"]
PROCESS = "pid"  # the label that prometheus_client gives the series of one of several processes


@dataclass(frozen=True, slots=True)
class Term:
    """The samples of one name whose labels are as `where` says, to be added, or with `sign` -1 to be taken off.

    For a histogram the name is the family's: its samples end in `_sum`, `_count` and `_bucket`.
    """

    name: str
    where: tuple[tuple[str, str], ...] = ()
    sign: int = 1
    scale: float = 1.0  # what is counted, in our unit: 1e-6 of microseconds; never of a number of observations

    def holds(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(label) == value for label, value in self.where)


Sum = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Translation:
    """A family of our catalogue, or its series with the given labels, made of the server's samples."""

    ours: str
    theirs: tuple[Sum, ...]  # alternatives, newest version first: the first whose names are all on the page
    labels: tuple[tuple[str, str], ...] = ()  # of ours; a label that is not here has all its values together
    same_labels: tuple[str, ...] = ()  # labels that the server has as we have them
    largest: bool = False  # of several series the largest, not the sum: for ratios, which do not add up
    # Its samples appear with the first event. Before that it is 0 where this counter of the same versions is there.
    begins_beside: str = ""
    versions: tuple[str, ...] = ()  # of each alternative the server's versions; () where the names never changed
    differs: str = ""  # how its meaning differs from ours


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's time that the server measures as a whole. Its mean is over all requests of the run."""

    name: str
    accounts: tuple[str, ...]  # that lie in it, without a split between them
    seconds: Sum  # grows by the time of each request
    requests: Sum  # grows by one for each request
    to_first_token: Sum  # the part of `seconds` up to the first token; () where it begins after that
    first_tokens: Sum  # number of requests behind `to_first_token`
    meaning: str


@dataclass(frozen=True, slots=True)
class Sight:
    """Whether an account's time can be seen: seen (a sum of its own), partly (a mean, together with others), unseen."""

    visibility: Visibility
    why: str


@dataclass(frozen=True, slots=True)
class Latency:
    """The server's own end-to-end latency: its sum in seconds, its number, and what lies outside of it."""

    seconds: Sum
    requests: Sum
    outside: tuple[str, ...]  # accounts that the server's latency leaves out


@dataclass(frozen=True, slots=True)
class SettingGauge:
    """Where a page shows a setting of the server: a label of a gauge, or the gauge's value where `label` is ""."""

    gauge: str
    label: str = ""


DRAFT_ROUNDS = "draft rounds"  # steps of a request that verified drafts
FRONT_CPU = "CPU of the front"  # seconds of the process that has the page, where it is the front
TIER_SECONDS = "time of a tier"  # seconds that reads and writes of a slower KV tier took
EXTERNAL_LOOKUPS, EXTERNAL_HITS = "external lookups", "external hits"  # tokens, of a cache beside the server's own
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of server. A new one is a file and an entry in `registry.SOURCES`."""

    key: str
    title: str
    version: str  # whose code the facts were read from
    prefix: str  # with which the names of its own samples begin
    oldest: str  # version of which all names are known
    translations: tuple[Translation, ...]
    spans: tuple[Span, ...]
    latency: Latency
    sights: Mapping[str, Sight]  # by account; an account that is missing here is unseen
    settings: Mapping[str, str]  # object of a cause → the server's own settings for it
    setting_gauges: Mapping[str, SettingGauge] = field(default_factory=dict)  # by our names of settings
    # Labels of its own series beside `model_name`: parts of one process, of which the catalogue tells only the sum.
    own_labels: tuple[str, ...] = ()
    # Those of processes that see the same requests and each report them: the first rank of a replica speaks for all.
    rank_labels: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()  # further samples that change with the engine's steps: signs that it lives
    stands_s: float = 0.0  # that gauges may stand still after the last request has ended
    live_gaps: bool = False  # whether gaps between tokens are counted as they happen, and not when a request ends
    engine_label: str = ""  # of the engines of one process, which have each a load of their own
    engine_counters: tuple[str, ...] = ()  # of such engines: one of these moves with each of its steps
    phases_at_end: bool = False  # a request's phases are counted when it ends, its first token when that comes
    # What the catalogue has no family for, and a cause reads: its name here → the server's samples, newest first.
    further: Mapping[str, tuple[Sum, ...]] = field(default_factory=dict)
    # What a summary says beside its means, by name: what grew, and over what. A name that ends in _ms is a time.
    ratios: Mapping[str, tuple[Sum, Sum]] = field(default_factory=dict)
    adapters: str = ""  # gauge whose labels name the adapters of running and of waiting requests, by its last change
    grammar_line: Term | None = None  # gauge of those that wait for a grammar
    # Whether others stand in that line, too: those that wait for an adapter or for an external cache.
    shares_grammar_line: bool = False
    part_label: str = ""  # of parts that stand beside their total, in which this label is empty
    # A label, and those of its values that hold what the others count again: where one is there, only it counts.
    whole_label: str = ""
    wholes: tuple[str, ...] = ()

    def translates(self, family: str) -> bool:
        """Whether it has the family at all, in some version."""
        return any(item.ours == family for item in self.translations)

    def counted(self, series: Sequence[Labels]) -> list[bool]:
        """Of the series of one name, given by their labels: which count, and do not repeat what others say.

        Series without ranks all count.
        """
        if self.wholes:
            whole = [labels.get(self.whole_label) in self.wholes for labels in series]
            return whole if any(whole) else [True] * len(series)
        if not self.rank_labels:
            return [True] * len(series)
        first: dict[tuple, tuple] = {}
        for labels in series:
            replica, rank = self._replica(labels), self._rank(labels)
            first[replica] = min(first.get(replica, rank), rank)
        return [
            not any(name in labels for name in self.rank_labels)
            or (first[self._replica(labels)] == self._rank(labels) and not labels.get(self.part_label))
            for labels in series
        ]

    def _rank(self, labels: Labels) -> tuple[int, ...]:
        return tuple(int(labels[name]) if labels.get(name, "").isdigit() else 0 for name in self.rank_labels)

    def _replica(self, labels: Labels) -> tuple[tuple[str, str], ...]:
        """What is left of the labels without the ranks: the replica, the model, the stage and so on."""
        left_out = (*self.rank_labels, self.part_label, PROCESS)
        return tuple(sorted((name, value) for name, value in labels.items() if name not in left_out))


def renamed(
    ours: str, *names: str, differs: str = "", same_labels: tuple[str, ...] = (), versions: tuple[str, ...] = ()
) -> Translation:
    """A family that the server has under a name of its own. `names`: those of its versions, newest first."""
    alternatives = tuple((Term(name),) for name in names)
    return Translation(ours, alternatives, differs=differs, same_labels=same_labels, versions=versions)


def measured_span(
    name: str, accounts: tuple[str, ...], family: str, meaning: str, *, before_first_token: bool = True, **where: str
) -> Span:
    """A stretch that one histogram of the server measures, before the first token or all after it."""
    seconds, requests = sum_of(family, **where), count_of(family, **where)
    first = (seconds, requests) if before_first_token else ((), ())
    return Span(name, accounts, seconds, requests, *first, meaning)


def unseen(why: str) -> Sight:
    return Sight("unseen", why)


def partly(why: str) -> Sight:
    return Sight("partly", why)


def sum_of(family: str, **where: str) -> Sum:
    return (Term(f"{family}_sum", tuple(where.items())),)


def count_of(family: str, **where: str) -> Sum:
    return (Term(f"{family}_count", tuple(where.items())),)
