"""A ladder of techniques: one setting more on each rung, what each rung gave, and which account of the ledger shrank.

In a closed loop the mean time of an output token, from the intended send of its request, is the open requests divided
by the tokens per second (Little, 1961). So the accounts, by token, are the reciprocal of the throughput.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pandas as pd

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.request.goodput import class_goodput, measured, measured_steps, tokens_per_s, window_ns
from sojourn.metrics.request.latencies import quantiles
from sojourn.metrics.run.directory import RunDirectory

FILE_NAME = "ladder.json"
# Waits for a place: what they cost follows from what the requests before them cost.
WAITS = ("request.queue", "memory.blocked")
TOLD_CHANGE = 0.2  # of the requests in a step, as a share
TELLING_BOUND = 3.0  # a technique that could shorten nearly everything has a bound that says nothing


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """A technique: the settings that switch it on, and those that stand in its place on the rungs below."""

    name: str
    on: dict[str, Any]
    off: dict[str, Any] = {}
    works_on: tuple[str, ...] = ()  # accounts that it can shorten by itself
    published: float | None = None  # the multiplier of throughput that the article states
    meaning: str = ""  # what it changes, as a sentence


class RungRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one rung."""

    rung: str
    repeat: int
    run: str  # folder, below the ladder's
    valid: bool
    reasons: list[str]  # why it is not valid
    sent: int
    completed: int
    output_tokens: int  # of the served requests that were measured
    goodput_rps: float | None
    attainment: float | None
    tokens_per_s: float | None
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    accounts_ms: dict[str, float]  # mean by output token of served requests; they sum to the time of a token
    batch: float | None = None  # requests of a step, mean over the steps
    step_ms: float | None = None  # of the device, mean over the steps


class Ladder(msgspec.Struct, kw_only=True):
    """The document of a ladder. `plan` identifies it: scenario, rungs, seed, machine."""

    plan: dict[str, Any]
    rungs: list[Rung]
    command: str = ""
    date: str = ""  # ISO 8601, UTC, of its first run
    hardware: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    device: str = ""
    runs: list[RungRun] = msgspec.field(default_factory=list)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A rung as a table shows it: medians over its valid repeats, and the ratio to the rung below, repeat by repeat."""

    rung: Rung
    repeats: int
    tokens_per_s: float | None
    goodput_rps: float | None
    attainment: float | None
    ttft_p50_ms: float | None
    tpot_p50_ms: float | None
    multiplier: float | None  # of tokens per second
    lowest: float | None
    highest: float | None
    accounts_ms: dict[str, float]
    change_ms: dict[str, float]  # by account, against the rung below; by output token
    batch: float | None
    step_ms: float | None
    batch_below: float | None
    step_below_ms: float | None
    reachable: float | None  # the multiplier, had the accounts it works on gone to nothing

    @property
    def shrank(self) -> tuple[str, float] | None:
        """The account that lost most, and how much, in milliseconds by output token."""
        return self._extreme(min)

    @property
    def grew(self) -> tuple[str, float] | None:
        return self._extreme(max)

    @property
    def resolved(self) -> bool:
        """Whether all repeats lie on one side of 1."""
        return self.lowest is not None and (self.lowest > 1 or self.highest < 1)

    def _extreme(self, choose) -> tuple[str, float] | None:
        if not self.change_ms:
            return None
        name = choose(self.change_ms, key=self.change_ms.__getitem__)
        change = self.change_ms[name]
        return (name, change) if (change < 0) == (choose is min) and change else None


def rung_run(run: RunDirectory, rung: str, repeat: int) -> RungRun:
    """Reads a finished run. Raises RunDataError where it is damaged."""
    meta = run.meta()
    requests = measured(run.requests(), meta)
    whole = class_goodput(requests, meta.get("objectives") or [])[0]
    span = window_ns(requests)
    served = requests[requests.status == "ok"]
    steps_of_load = measured_steps(run.table("steps"), requests)
    batches = steps_of_load.request_ids.map(len)
    return RungRun(
        rung=rung, repeat=repeat, run=run.name, valid=bool(meta.get("valid")) and whole.completed > 0,
        reasons=list(meta.get("invalid_reasons") or []), sent=whole.sent, completed=whole.completed,
        output_tokens=int(served.output_tokens.sum()), goodput_rps=whole.goodput_rps, attainment=whole.attainment,
        tokens_per_s=tokens_per_s(requests.output_tokens, (span[1] - span[0]) / 1e9 if span else 0.0),
        ttft_ms=quantiles(served.ttft_ms), tpot_ms=quantiles(served.tpot_ms), accounts_ms=accounts_ms(served),
        batch=float(batches.mean()) if len(batches) else None,
        step_ms=float(steps_of_load.device_ns.astype("float64").mean()) / 1e6 if len(batches) else None,
    )  # fmt: skip


def accounts_ms(served: pd.DataFrame) -> dict[str, float]:
    """Milliseconds of each account by output token, of served requests; `unaccounted` is what none explains."""
    tokens = int(served.output_tokens.sum()) if len(served) else 0
    if not tokens:
        return {}
    booked = {
        info.name: float(served[f"ledger_{info.column}"].astype("float64").sum()) / 1e6 / tokens
        for info in ACCOUNTS
        if served[f"ledger_{info.column}"].notna().any()
    }
    whole = float(served.e2e_ms.astype("float64").sum()) / tokens
    return {name: spent for name, spent in booked.items() if spent} | {"unaccounted": whole - sum(booked.values())}


def steps(ladder: Ladder) -> list[Step]:
    """The rungs that have a valid run, from the lowest up."""
    found: list[Step] = []
    below: dict[int, RungRun] = {}
    for rung in ladder.rungs:
        runs = {each.repeat: each for each in ladder.runs if each.rung == rung.name and each.valid}
        if runs:
            found.append(_step(rung, runs, below, found[-1] if found else None))
            below = runs
    return found


def read_ladder(folder: Path) -> Ladder:
    """Raises RunDataError where there is none."""
    file = folder / FILE_NAME
    try:
        return msgspec.json.decode(file.read_bytes(), type=Ladder)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDataError(f"{file} cannot be read: {error}; remove its folder to measure again") from None


def sentence(step: Step) -> str:
    """What the rung did, and why not more: from the accounts, never from what was expected."""
    if step.multiplier is None:
        return step.rung.meaning
    parts = [step.rung.meaning]
    if not step.resolved and step.repeats > 1:
        parts.append("The repeats lie on both sides of 1, so this load on this machine shows no effect.")
    if step.shrank:
        parts.append(f"The account {step.shrank[0]} fell by {-step.shrank[1]:.2f} ms a token.")
    if step.grew and step.shrank and step.grew[1] > 0.15 * -step.shrank[1]:
        parts.append(f"The account {step.grew[0]} grew by {step.grew[1]:.2f} ms a token.")
    if step.batch and step.batch_below and abs(step.batch / step.batch_below - 1) > TOLD_CHANGE:
        parts.append(
            f"A step held {step.batch:.1f} requests in place of {step.batch_below:.1f}, and took {step.step_ms:.1f} ms "
            f"in place of {step.step_below_ms:.1f}."
        )
    if step.reachable is not None and step.reachable < TELLING_BOUND:
        named = " and ".join(step.rung.works_on)
        parts.append(f"Without {named} the rung below would be {step.reachable:.2f} times as fast: that is its bound.")
    return " ".join(parts)


def _step(rung: Rung, runs: Mapping[int, RungRun], below: Mapping[int, RungRun], lower: Step | None) -> Step:
    ratios = [
        run.tokens_per_s / below[repeat].tokens_per_s
        for repeat, run in runs.items()
        if repeat in below and run.tokens_per_s and below[repeat].tokens_per_s
    ]
    accounts = _middle_accounts(list(runs.values()))
    before = {} if lower is None else lower.accounts_ms
    change = (
        {name: accounts.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **accounts}} if before else {}
    )
    values = list(runs.values())
    return Step(
        rung=rung, repeats=len(runs), tokens_per_s=_middle([run.tokens_per_s for run in values]),
        goodput_rps=_middle([run.goodput_rps for run in values]),
        attainment=_middle([run.attainment for run in values]),
        ttft_p50_ms=_middle([run.ttft_ms.get("p50") for run in values]),
        tpot_p50_ms=_middle([run.tpot_ms.get("p50") for run in values]),
        multiplier=_middle(ratios), lowest=min(ratios, default=None), highest=max(ratios, default=None),
        accounts_ms=accounts, change_ms=change, reachable=_reachable(rung, before),
        batch=_middle([run.batch for run in values]), step_ms=_middle([run.step_ms for run in values]),
        batch_below=None if lower is None else lower.batch, step_below_ms=None if lower is None else lower.step_ms,
    )  # fmt: skip


def _reachable(rung: Rung, before: Mapping[str, float]) -> float | None:
    """The bound of a technique by what it works on (Amdahl, 1967). Waits for a place shrink with the rest."""
    working = sum(spent for name, spent in before.items() if name not in WAITS)
    left = working - sum(before.get(name, 0.0) for name in rung.works_on)
    return working / left if rung.works_on and working and left > 0 else None


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _middle_accounts(runs: Sequence[RungRun]) -> dict[str, float]:
    names = {name for run in runs for name in run.accounts_ms}
    return {name: median(run.accounts_ms.get(name, 0.0) for run in runs) for name in sorted(names)}
