"""Filters of the pages Requests and Steps, as the address holds them: a link to a page can carry what it shows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import pandas as pd

from metrics.ledger import ACCOUNT_BY_NAME, UNACCOUNTED
from metrics.request.goodput import judged
from metrics.request.objectives import OBJECTIVE_NAMES, OBJECTIVES, short
from ui.tables.request import accounts_ms
from ui.text import percent

SERVED = "served"  # as an objective: every request has it
UNTIL = ("ledger", "ttft")  # to the last byte, or to the first token
MOST_IDS = 50  # that a link carries


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests a page shows. An empty field lets all pass."""

    klass: str = ""
    missed: str = ""  # of OBJECTIVES, or SERVED: those that miss it
    account: str = ""  # with `min_share` of their time, up to `until`, in this account
    min_share: float = 0.0  # 0 to 1
    until: str = "ledger"
    ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        """From the parameters of an address; what no filter understands is left out."""
        share = _number(query.get("min_share", ""))
        account = query.get("account", "")
        return cls(
            klass=query.get("class", ""),
            missed=missed if (missed := query.get("missed", "")) in (*OBJECTIVES, SERVED) else "",
            account=account if account in (*ACCOUNT_BY_NAME, UNACCOUNTED) else "",
            min_share=min(1.0, max(0.0, share or 0.0)),
            until=until if (until := query.get("until", "")) in UNTIL else "ledger",
            ids=tuple(filter(None, query.get("ids", "").split(",")))[:MOST_IDS],
        )

    def query(self) -> dict[str, str]:
        """The parameters of an address that holds this filter."""
        found = {"class": self.klass, "missed": self.missed, "account": self.account, "ids": ",".join(self.ids)}
        if self.account:
            found |= {"min_share": f"{self.min_share:g}", "until": self.until}
        return {name: value for name, value in found.items() if value}

    def labels(self) -> dict[str, str]:
        """Each part that is set, in words: what a reader can take away."""
        found = {}
        if self.klass:
            found["class"] = f"class {self.klass}"
        if self.missed:
            found["missed"] = (
                "was not served" if self.missed == SERVED else f"misses its {OBJECTIVE_NAMES[self.missed]}"
            )
        if self.account:
            until = "time to first token" if self.until == "ttft" else "time"
            found["account"] = f"{percent(self.min_share)} or more of its {until} in {self.account}"
        if self.ids:
            found["ids"] = f"{len(self.ids)} named requests" if len(self.ids) > 1 else f"request {self.ids[0]}"
        return found

    def without(self, part: str) -> Self:
        empty = {
            "class": {"klass": ""}, "missed": {"missed": ""}, "ids": {"ids": ()},
            "account": {"account": "", "min_share": 0.0, "until": "ledger"},
        }  # fmt: skip
        return replace(self, **empty[part])

    def apply(self, requests: pd.DataFrame, objectives: list[dict[str, Any]] | None) -> pd.DataFrame:
        """The rows that pass, in their order."""
        rows = requests
        if self.klass:
            rows = rows[rows.klass.fillna("") == self.klass]
        if self.missed == SERVED:
            rows = rows[rows.status != "ok"]
        elif self.missed and len(rows):
            met = judged(rows, objectives)[f"{short(self.missed)}_met"]
            rows = rows[(~met.fillna(True)).to_numpy(dtype=bool)]
        if self.account:
            booked = accounts_ms(rows, self.until)
            share = booked[self.account] / booked.sum(axis=1).where(lambda total: total > 0)
            rows = rows.loc[share.index[share >= self.min_share]]
        return rows[rows.request_id.isin(self.ids)] if self.ids else rows


@dataclass(frozen=True, slots=True)
class StepFilter:
    """Which steps a page shows: from `first` to `last`, both included; None is open."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Self:
        return cls(*(None if (value := _number(query.get(each.name, ""))) is None else int(value)
                     for each in fields(cls)))  # fmt: skip

    def query(self) -> dict[str, str]:
        return {each.name: str(value) for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def labels(self) -> dict[str, str]:
        found = {}
        if self.first is not None:
            found["first"] = f"from step {self.first:,}"
        if self.last is not None:
            found["last"] = f"to step {self.last:,}"
        return found

    def without(self, part: str) -> Self:
        return replace(self, **{part: None})

    def apply(self, steps: pd.DataFrame) -> pd.DataFrame:
        low = self.first if self.first is not None else float("-inf")
        high = self.last if self.last is not None else float("inf")
        return steps[steps.step.between(low, high)].reset_index(drop=True)


def missed_by(objective: str) -> tuple[str, str]:
    """The objective and the class in the words of a finding: `ttft ≤ 500 ms for chat` → ("ttft_ms", "chat")."""
    if lost := re.match(r"served: “.*”(?: for (.+))?$", objective):
        return SERVED, lost[1] or ""
    found = re.match(r"(\w+) ≤ .* ms(?: for (.+))?$", objective)
    name = f"{found[1]}_ms" if found else ""
    return (name, found[2] or "") if name in OBJECTIVES else ("", "")


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e15 else None
