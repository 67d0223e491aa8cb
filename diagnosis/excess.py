"""Where the time above an objective went: the ledger of late requests against that of the requests in time.

A request whose client left before the first token is late once it has waited longer than the bound. Other requests that
were lost count beside those that were late: an excess without accounts, one for each class and error.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import pandas as pd

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.shares import ledger_columns
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.records import NO_END
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.objectives import OBJECTIVES, objectives_of

FEWEST_GOOD = 5  # requests that meet the objective; below it their mean is no baseline
# Requests that meet an objective are a baseline only if they are clearly faster. If they are nearly as slow, both have
# the cause in common, and a difference of a few milliseconds would name the wrong account.
CLEARLY_FASTER = 0.7  # of the bound
EMPTY = "in an empty server"  # the baseline of time that a loss follows from
SERVED = "served"  # the objective that a lost request misses


@dataclass(frozen=True, slots=True)
class Excess:
    """The time that the late requests of one class spent above the others: those that miss one objective.

    Of lost requests: their number and their error; `accounts` is empty, and the bound and the mean are 0.
    """

    objective: str  # of OBJECTIVES, or SERVED
    klass: str
    bound_ms: float
    missed: int  # requests of the class above the bound
    sent: int  # of the class
    mean_ms: float  # of the late requests
    baseline: str  # a noun: what the mean is compared with; each account in proportion if it is the objective
    accounts: dict[str, float]  # account → ms of the late requests above the baseline; may be negative
    missing: pd.Index  # rows of the late requests in Client.rows
    error: str = ""  # what lost requests ended with

    @property
    def total_ms(self) -> float:
        return sum(max(ms, 0.0) for ms in self.accounts.values())

    @property
    def name(self) -> tuple[str, str, str]:
        """What it is of: class, objective, error."""
        return self.klass, self.objective, self.error

    def share(self, *names: str) -> float:
        """The part of the excess that these accounts explain together, 0 to 1."""
        return sum(max(self.accounts.get(name, 0.0), 0.0) for name in names) / self.total_ms if self.total_ms else 0.0

    def ranked(self) -> list[tuple[str, float]]:
        """Accounts with a positive excess and their share of it, largest first."""
        order = sorted(self.accounts, key=lambda name: -self.accounts[name])
        return [(name, self.share(name)) for name in order if self.accounts[name] > 0]


def accounts_of(rows: pd.DataFrame, objective: str) -> pd.DataFrame:
    """Each request's accounts in ms of the objective's own quantity: per output token after the first for tpot_ms."""
    if objective == "ttft_ms":
        return ledger_columns(rows, "ttft")
    whole = ledger_columns(rows, "ledger")
    if objective == "e2e_ms":
        return whole
    first = ledger_columns(rows, "ttft")
    if objective == "ttfa_ms":  # the reasoning takes its part, by time, of what lies behind the first token
        ttft_ms, ttfa_ms, e2e_ms = (rows[name].astype("float64") for name in ("ttft_ms", "ttfa_ms", "e2e_ms"))
        return first + (whole - first).mul((ttfa_ms - ttft_ms) / (e2e_ms - ttft_ms), axis=0)
    gaps = (rows.output_tokens.astype("float64") - 1).where(lambda n: n > 0)
    return (whole - first).div(gaps, axis=0)


_computed: WeakKeyDictionary[Client, tuple[Excess, ...]] = WeakKeyDictionary()  # several parts of a diagnosis ask


def excesses(facts: Client) -> tuple[Excess, ...]:
    """One for each class and objective that some served request misses; most misses first."""
    if facts not in _computed:
        found = [
            _excess(facts.rows[facts.rows.klass == klass], klass, objective, bound)
            for klass in sorted(facts.rows.klass.unique())
            for objective, bound in objectives_of(klass, facts.objectives).items()
        ]
        late = (excess for excess in found if excess is not None)
        _computed[facts] = tuple(sorted(late, key=lambda excess: -excess.missed))
    return _computed[facts]


def _excess(rows: pd.DataFrame, klass: str, objective: str, bound: float) -> Excess | None:
    if objective not in rows:
        return None
    served = rows[(rows.status == "ok") & rows[objective].notna()]
    late = served[served[objective] > bound]
    if objective == "ttft_ms" and len(given_up := _given_up(rows)):
        late = pd.concat([late, given_up[given_up.ttft_ms > bound]])
    good = served[served[objective] <= bound]
    if not len(late):
        return None
    spent = accounts_of(late, objective).mean()
    mean_ms = float(late[objective].mean())
    if len(good) >= FEWEST_GOOD and good[objective].mean() <= CLEARLY_FASTER * bound:
        above = spent - accounts_of(good, objective).mean()
        baseline = f"the {len(good)} that meet the objective"
    else:
        above = spent * (1 - bound / mean_ms)
        baseline = "the objective"
    return Excess(
        objective=objective,
        klass=klass,
        bound_ms=bound,
        missed=len(late),
        sent=len(rows),
        mean_ms=mean_ms,
        baseline=baseline,
        accounts={name: float(ms) for name, ms in above.items() if pd.notna(ms)},
        missing=late.index,
    )


def _given_up(rows: pd.DataFrame) -> pd.DataFrame:
    """The requests whose client left before the first token: the server's accounts of them say what they waited for.
    Their `ttft_ms` is what they waited, the least that it would have been."""
    left = rows[(rows.status == "cancelled") & rows.first_token_ns.isna() & rows.finished_ns.notna()].copy()
    if len(left):
        left["ttft_ms"] = (left.finished_ns.astype("float64") - left.due_ns.astype("float64")) / 1e6
        for info in ACCOUNTS:
            left[f"ttft_{info.column}"] = left[f"ledger_{info.column}"]
    return left


def _late_given_up(facts: Client) -> pd.Index:
    left = _given_up(facts.rows)
    bounds = left.klass.map(lambda klass: objectives_of(klass, facts.objectives).get("ttft_ms"))
    return left.index[left.ttft_ms > bounds.astype("float64")]


def losses(facts: Client) -> list[Excess]:
    """The lost requests, one for each class and error; most requests first. Those never sent are not the server's, and
    those that were given up late are in `excesses`."""
    late = _late_given_up(facts)
    rows = facts.rows[(facts.rows.status != "ok") & (facts.rows.error != NO_END) & ~facts.rows.index.isin(late)]
    ended = rows.error.fillna(rows.status).astype(str)
    alike = ended.str.replace(r"\d+", "N", regex=True)  # "try again in 3 s" and "… in 4 s" are one error
    sent = facts.rows.groupby("klass").size()
    found = [
        Excess(objective=SERVED, klass=klass, bound_ms=0.0, missed=len(same), sent=int(sent[klass]), mean_ms=0.0,
               baseline="the served requests", accounts={}, missing=same.index, error=ended[same.index].mode()[0])
        for (klass, _), same in rows.groupby([rows.klass, alike])
    ]  # fmt: skip
    return sorted(found, key=lambda loss: -loss.missed)


def failures_lead(lost: Sequence[Excess]) -> bool:
    """Whether more requests failed than were late: then what failed them comes before what slows the others."""
    failed: set[Hashable] = set()
    late: set[Hashable] = set()
    for each in lost:
        (failed if each.objective == SERVED else late).update(each.missing)
    return len(failed) > len(late)


def attainment(facts: Client) -> float:
    """Share of the sent requests that met every objective of their class."""
    return float(facts.rows.good.mean()) if facts.sent else 0.0


def rows_without(facts: Client, claims: Mapping[str, float]) -> pd.DataFrame:
    """The requests judged as if each had spent these shares (0 to 1) of its accounts less. An estimate, and no bound:
    time that one account loses may come back in another, and requests that are faster leave room for those behind them.
    """
    rows = facts.rows.copy()
    for objective in (name for name in OBJECTIVES if name in rows and rows[name].notna().any()):
        accounts = accounts_of(rows, objective)
        saved = sum((accounts[name].fillna(0) * part for name, part in claims.items()), start=0.0 * rows.due_ns)
        rows[objective] = rows[objective].astype("float64") - saved
    return judged(rows, facts.objectives)
