"""What a server's /metrics tells, in our words. A source is data, read from the server's own code.

It says which samples make which family of `metrics.catalog`, which stretches of a request's time the server measures,
and of each account of the ledger whether it can be seen there, with the reason.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol

Visibility = Literal["seen", "partly", "unseen"]


@dataclass(frozen=True, slots=True)
class Term:
    """The samples of one name whose labels are as `where` says, to be added, or with `sign` -1 to be taken off.

    For a histogram the name is the family's: its samples end in `_sum`, `_count` and `_bucket`.
    """

    name: str
    where: tuple[tuple[str, str], ...] = ()
    sign: int = 1

    def holds(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(label) == value for label, value in self.where)


Sum = tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Translation:
    """A family of our catalogue, or its series with the given labels, made of the server's samples."""

    ours: str
    theirs: tuple[Sum, ...]  # alternatives, newest version first: the first whose names are all on the page
    labels: tuple[tuple[str, str], ...] = ()  # of ours; one that is left out is told of all its values together
    keeps: tuple[str, ...] = ()  # labels that the server has as we have them
    largest: bool = False  # of several series the largest, not the sum: for ratios, which do not add up
    begins_with_first: bool = False  # its samples appear with the first event: before that it is 0, not unknown
    differs: str = ""  # how its meaning differs from ours


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's time that the server measures as a whole. Its mean is over all requests of the run."""

    name: str
    accounts: tuple[str, ...]  # that lie in it and are not told apart
    seconds: Sum  # grows by the time of each request ...
    requests: Sum  # ... and this by one
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
class Told:
    """Where a page tells a setting of the server: a label of a gauge, or the gauge's value where `label` is ""."""

    gauge: str
    label: str = ""


class Source(Protocol):
    """One kind of server. Swap point: a new server is one file and one entry in `registry.SOURCES`."""

    key: str
    title: str
    facts: str  # version whose code the facts were read from
    translations: tuple[Translation, ...]
    spans: tuple[Span, ...]
    latency: Latency
    sights: Mapping[str, Sight]  # by account; one that is missing here is unseen
    settings: Mapping[str, str]  # object of a cause → the server's own settings for it
    told: Mapping[str, Told]  # what the server was set to, by our names of settings

    def recognises(self, names: AbstractSet[str]) -> bool:
        """Whether a page with samples of these names is of such a server."""

    def speakers(self, series: Sequence[Mapping[str, str]]) -> list[bool]:
        """Of the series of one name, given by their labels, which count: not those that repeat what others say."""


def unseen(why: str) -> Sight:
    return Sight("unseen", why)


def partly(why: str) -> Sight:
    return Sight("partly", why)


def sum_of(family: str, **where: str) -> Sum:
    return (Term(f"{family}_sum", tuple(where.items())),)


def count_of(family: str, **where: str) -> Sum:
    return (Term(f"{family}_count", tuple(where.items())),)
