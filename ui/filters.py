"""The filter that all pages share, as the address holds it: a link to a page can carry what it shows."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pandas as pd

from sojourn.metrics import cells
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, UNACCOUNTED
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES, OBJECTIVES, short
from sojourn.ui.tables.request import accounts_ms
from sojourn.ui.text import percent

SERVED = "served"  # as an objective: every request has it
ANY = "any"  # of its objectives, or not served
UNTIL = ("ledger", "ttft")  # to the last byte, or to the first token
MOST_IDS = 50  # that a link carries
NO_NAME = "(none)"  # stands in an address for the empty class or tenant
COLUMNS = {"class": "klass", "tenant": "tenant", "status": "status"}  # of the requests, by their parameter
# What a number of an address must be.
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "min_share": ("a share from 0 to 1", lambda value: 0 <= value <= 1),
    "from": ("a number of seconds", math.isfinite), "to": ("a number of seconds", math.isfinite),
    "first": ("the number of a step", float.is_integer), "last": ("the number of a step", float.is_integer),
}  # fmt: skip
PARAMETERS = (
    "class", "tenant", "status", "missed", "account", "min_share", "until", "ids", "from", "to", "first", "last",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which requests and steps of a run the pages show. An empty field lets all pass."""

    klasses: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    missed: str = ""  # of OBJECTIVES, SERVED or ANY: those that miss it
    account: str = ""  # with `min_share` of their time, up to `until`, in this account
    min_share: float = 0.0  # 0 to 1
    until: str = "ledger"
    ids: tuple[str, ...] = ()
    from_s: float | None = None  # due, or begun, at least so long after the begin of the run
    to_s: float | None = None  # due, or begun, less long after it
    first: int | None = None  # steps, both included
    last: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """From the parameters of an address; what no filter understands is left out."""
        share, account = _number(query.get("min_share", "")), query.get("account", "")
        until = query.get("until", "")
        first, last = (_number(query.get(name, "")) for name in ("first", "last"))
        return cls(
            klasses=_names(query.get("class", "")),
            tenants=_names(query.get("tenant", "")),
            statuses=_names(query.get("status", "")),
            missed=missed if (missed := query.get("missed", "")) in (*OBJECTIVES, SERVED, ANY) else "",
            account=account if account in (*ACCOUNT_BY_NAME, UNACCOUNTED) else "",
            min_share=min(1.0, max(0.0, share or 0.0)) if account in (*ACCOUNT_BY_NAME, UNACCOUNTED) else 0.0,
            until=until if account and until in UNTIL else "ledger",
            ids=tuple(filter(None, query.get("ids", "").split(",")))[:MOST_IDS],
            from_s=_number(query.get("from", "")), to_s=_number(query.get("to", "")),
            first=None if first is None else int(first), last=None if last is None else int(last),
        )  # fmt: skip

    def query(self) -> dict[str, str]:
        """The parameters of an address that holds this filter."""
        found = {
            "class": _address(self.klasses), "tenant": _address(self.tenants), "status": _address(self.statuses),
            "missed": self.missed, "account": self.account, "ids": ",".join(self.ids),
        }  # fmt: skip
        if self.account:
            found |= {"min_share": f"{self.min_share:g}", "until": self.until}
        numbers = {"from": self.from_s, "to": self.to_s, "first": self.first, "last": self.last}
        found |= {name: f"{value:.10g}" for name, value in numbers.items() if value is not None}
        return {name: value for name, value in found.items() if value}

    def labels(self) -> dict[str, str]:
        """Each part that is set, in words: what a reader can take away."""
        found = {}
        for part, names in (("class", self.klasses), ("tenant", self.tenants), ("status", self.statuses)):
            if names:
                found[part] = f"{part} {', '.join(name or NO_NAME for name in names)}"
        if self.missed:
            found["missed"] = _missed_in_words(self.missed)
        if self.account:
            until = "time to first token" if self.until == "ttft" else "time"
            found["account"] = f"{percent(self.min_share)} or more of its {until} in {self.account}"
        if self.ids:
            found["ids"] = f"{len(self.ids)} named requests" if len(self.ids) > 1 else f"request {self.ids[0]}"
        if self.from_s is not None or self.to_s is not None:
            found["time"] = _span(self.from_s, self.to_s, "second {:,g}")
        if self.first is not None or self.last is not None:
            found["steps"] = _span(self.first, self.last, "step {:,}")
        return found

    def without(self, part: str) -> Self:
        empty: dict[str, dict[str, Any]] = {
            "class": {"klasses": ()}, "tenant": {"tenants": ()}, "status": {"statuses": ()}, "missed": {"missed": ""},
            "ids": {"ids": ()}, "account": {"account": "", "min_share": 0.0, "until": "ledger"},
            "time": {"from_s": None, "to_s": None}, "steps": {"first": None, "last": None},
        }  # fmt: skip
        return replace(self, **empty[part])

    def of_requests(self) -> bool:
        """Whether it holds back requests by anything but time."""
        return bool(set(self.labels()) - {"time", "steps"})

    def requests(self, rows: pd.DataFrame, objectives: list[dict[str, Any]] | None, begin_ns: float) -> pd.DataFrame:
        """The requests that pass, in their order. `begin_ns` is second 0 of the run."""
        for column, names in (("klass", self.klasses), ("tenant", self.tenants), ("status", self.statuses)):
            if names:
                rows = rows[rows[column].fillna("").isin(names)]
        rows = self._in_time(rows, rows.due_ns, begin_ns)
        if self.missed == SERVED:
            rows = rows[rows.status != "ok"]
        elif self.missed and len(rows):
            found = judged(rows, objectives)
            held = found.good if self.missed == ANY else found[f"{short(self.missed)}_met"].fillna(True)
            rows = rows[(~held).to_numpy(dtype=bool)]
        if self.account:
            booked = accounts_ms(rows, self.until)
            share = booked[self.account] / booked.sum(axis=1).where(lambda total: total > 0)
            rows = rows.loc[share.index[share >= self.min_share]]
        return rows[rows.request_id.isin(self.ids)] if self.ids else rows

    def steps(self, rows: pd.DataFrame, requests: pd.DataFrame, begin_ns: float) -> pd.DataFrame:
        """The steps that pass: of these numbers, begun in this time, with work for one of the `requests` that pass."""
        if self.first is not None or self.last is not None:
            low = self.first if self.first is not None else float("-inf")
            rows = rows[rows.step.between(low, self.last if self.last is not None else float("inf"))]
        rows = self._in_time(rows, rows.begin_ns, begin_ns)
        if self.of_requests() and len(rows):
            members, step = cells.values(rows.request_ids)
            passes = pd.Series(members).isin(set(requests.request_id)).to_numpy()
            holds = np.bincount(step[passes], minlength=len(rows)) > 0
            rows = rows[holds]
        return rows.reset_index(drop=True)

    def during(self, rows: pd.DataFrame, at_ns: pd.Series, begin_ns: float) -> pd.DataFrame:
        """The rows of another table that lie in the time window, by their moments."""
        return self._in_time(rows, at_ns, begin_ns) if len(rows) else rows

    def _in_time(self, rows: pd.DataFrame, at_ns: pd.Series, begin_ns: float) -> pd.DataFrame:
        if self.from_s is None and self.to_s is None:
            return rows
        at_s = (at_ns.astype("float64") - begin_ns) / 1e9
        low, high = (float("-inf") if self.from_s is None else self.from_s), self.to_s
        return rows[((at_s >= low) & (at_s < (float("inf") if high is None else high))).to_numpy()]


def unknown_values(query: Mapping[str, str], requests: pd.DataFrame, whose: str = "this run") -> dict[str, str]:
    """For each parameter of an address that names what `requests` do not have, or that no filter understands, a
    sentence about it. `whose` they are."""
    return _absent(query, requests, whose) | _misunderstood(query)


def _absent(query: Mapping[str, str], requests: pd.DataFrame, whose: str) -> dict[str, str]:
    found = {}
    for name, column in COLUMNS.items():
        wanted = _names(query.get(name, ""))
        known = set(requests[column].fillna("")) if wanted else ()
        if missing := [value or NO_NAME for value in wanted if value not in known]:
            found[name] = f"No request of {whose} has the {name} {', '.join(missing)}."
    ids = list(filter(None, query.get("ids", "").split(",")))
    known = set(requests.request_id) if ids else ()
    if missing := [each for each in ids if each not in known]:
        found["ids"] = f"No request of {whose} is {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}."
    elif len(ids) > MOST_IDS:
        found["ids"] = f"A link names at most {MOST_IDS} requests, and this one names {len(ids)}."
    return found


def _misunderstood(query: Mapping[str, str]) -> dict[str, str]:
    found, accounts = {}, (*ACCOUNT_BY_NAME, UNACCOUNTED)
    for name, known in (("missed", (*OBJECTIVES, SERVED, ANY)), ("account", accounts), ("until", UNTIL)):
        if (value := query.get(name)) is not None and value not in known:
            found[name] = f"No filter knows {name}={value}; there are {', '.join(known)}."
    for name, (words, fits) in NUMBERS.items():
        number = _number(query.get(name, "0"))
        if number is None or not fits(number):
            found[name] = f"No filter knows {name}={query[name]}: it is {words}."
    if "account" not in query and (alone := [name for name in ("min_share", "until") if name in query]):
        found = {name: f"{name} goes with an account, and the link names none." for name in alone} | found
    return found


def missed_by(objective: str) -> tuple[str, str]:
    """The objective and the class in the words of a finding: `ttft ≤ 500 ms for chat` → ("ttft_ms", "chat")."""
    if lost := re.match(r"served: “.*”(?: for (.+))?$", objective):
        return SERVED, lost[1] or ""
    found = re.match(r"(\w+) ≤ .* ms(?: for (.+))?$", objective)
    name = f"{found[1]}_ms" if found else ""
    return (name, found[2] or "") if name in OBJECTIVES else ("", "")


def _missed_in_words(missed: str) -> str:
    if missed == ANY:
        return "misses an objective"
    return "was not served" if missed == SERVED else f"misses its {OBJECTIVE_NAMES[missed]}"


def _span(low: float | None, high: float | None, words: str) -> str:
    ends = [f"from {words.format(low)}"] if low is not None else []
    return " ".join([*ends, f"to {words.format(high)}"] if high is not None else ends)


def _names(text: str) -> tuple[str, ...]:
    """Names of an address, apart by commas; a comma of a name stands as %2C."""
    parts = [part.replace("%2C", ",").replace("%25", "%") for part in text.split(",") if part]
    return tuple("" if part == NO_NAME else part for part in parts)


def _address(names: tuple[str, ...]) -> str:
    return ",".join(name.replace("%", "%25").replace(",", "%2C") or NO_NAME for name in names)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None
