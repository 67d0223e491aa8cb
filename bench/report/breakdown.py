"""Where the wall time of a benchmark went, by its step records, and how near to the roofline it was.

Two accounts of the same time, each of which must sum to it. *Host*: the exclusive stages of every step, and the pauses
between steps. *Device*: the device's time, split by how many of its tokens were wanted, and the gaps in which it had
nothing to do. What lies before the first step and after the last one belongs to both.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.results import BenchError
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.records import STAGES, StepRecord

CLOSURE = 0.01  # of the wall time that may stay unexplained
COLUMNS = (
    "begin_ns", "end_ns", "device_ns", "gap_ns", "draft_ns", "padding_tokens", "overrun_tokens", "tokens", "flops",
    "bytes", "replayed", *(f"stage_{stage}_ns" for stage in STAGES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """Figures of the steps of one measurement: an array [num_steps] for each of COLUMNS."""

    columns: dict[str, np.ndarray]

    @property
    def count(self) -> int:
        return len(self.columns["begin_ns"])

    def total(self, column: str) -> int:
        return int(self.columns[column].sum())


def steps_of_records(records: Sequence[StepRecord]) -> Steps:
    """Of a core in this process."""
    values = {
        name: [getattr(record, name) for record in records]
        for name in COLUMNS
        if name not in ("tokens", "replayed") and not name.startswith("stage_")
    }
    values["tokens"] = [sum(record.new_tokens) for record in records]
    values["replayed"] = [record.graph != "eager" for record in records]
    for index, stage in enumerate(STAGES):
        values[f"stage_{stage}_ns"] = [record.stages[index] for record in records]
    return Steps({name: np.array(values[name], dtype=np.float64) for name in COLUMNS})


def steps_of_table(table: pd.DataFrame, begin_ns: int, end_ns: int) -> Steps:
    """Of a server's steps.parquet: those that ran between two readings of the monotonic clock."""
    inside = table[(table["end_ns"] > begin_ns) & (table["begin_ns"] < end_ns)].sort_values("step")
    inside = inside.assign(
        tokens=[int(sum(new)) for new in inside["new_tokens"]], replayed=(inside["graph"] != "eager").to_numpy()
    )
    return Steps({name: inside[name].to_numpy(dtype=np.float64) for name in COLUMNS})


def explain(steps: Steps, begin_ns: int, end_ns: int) -> dict[str, float]:
    """Milliseconds of a measurement from `begin_ns` to `end_ns` by account. The host's and the device's accounts, each
    with `pauses` and `outside`, sum to `wall`, within what `complaint` allows.

    `wall` holds all of each step, also what lies before `begin_ns` or behind `end_ns`: one that hands over the last
    token goes on when its reader has it already.
    """
    if not steps.count:
        raise BenchError("no step was recorded while the benchmark ran")
    columns = steps.columns
    first, last = columns["begin_ns"][0], columns["end_ns"][-1]
    began_ns, over_ns = min(first, begin_ns), max(last, end_ns)
    outside = first - began_ns + over_ns - last
    pauses = float((columns["begin_ns"][1:] - columns["end_ns"][:-1]).clip(min=0).sum())
    accounts = {f"host {stage}": float(columns[f"stage_{stage}_ns"].sum()) for stage in STAGES}
    accounts |= {"pauses": pauses, "outside": outside}
    tokens, padding, overrun = columns["tokens"], columns["padding_tokens"], columns["overrun_tokens"]
    share = columns["device_ns"] / np.maximum(tokens + padding, 1)
    accounts["device padding"] = float((share * padding).sum())
    accounts["device overrun"] = float((share * overrun).sum())
    accounts["device work"] = (
        float(columns["device_ns"].sum()) - accounts["device padding"] - accounts["device overrun"]
    )
    accounts["device drafts"] = float(columns["draft_ns"].sum())
    accounts["device gaps"] = float(columns["gap_ns"].sum())
    # After the last step before a pause, the device's next gap begins when the loop awakes; the host still had work.
    idle_after = np.append(columns["begin_ns"][1:] > columns["end_ns"][:-1], True)
    accounts["device gaps"] += float((columns["stage_commit_ns"] + columns["stage_publish_ns"])[idle_after].sum())
    accounts["wall"] = over_ns - began_ns
    return {name: float(value) / 1e6 for name, value in accounts.items()} | {
        "steps": steps.count,
        "replayed": steps.total("replayed"),
    }


def complaint(accounts: dict[str, float]) -> str | None:
    """What the accounts of `explain` leave open, as a sentence; None where each sums to the wall within CLOSURE."""
    for account in ("host", "device"):
        sums = sum(
            ms for name, ms in accounts.items() if name.startswith(f"{account} ") or name in ("pauses", "outside")
        )
        if abs(sums - accounts["wall"]) > CLOSURE * accounts["wall"]:
            return (
                f"the {account} accounts of {accounts['steps']:,} steps sum to {sums:,.1f} ms, but "
                f"{accounts['wall']:,.1f} ms passed: the step records do not explain the figure"
            )
    return None


def utilisation(steps: Steps, wall_ns: int, ceilings: Ceilings, precision: str) -> dict[str, float]:
    """How much of the device the steps used, in percent.

    `roofline`: the time that their exact FLOPs and bytes need at the measured ceilings, the greater of both in each
    step, over the time that passed. `mfu`, `mbu`: of its arithmetic and of its bandwidth alone. `device_idle`: of the
    steps' time, what the device had nothing to do in.
    """
    columns = steps.columns
    needed_ns = float(ceilings.roofline_ns(columns["flops"], columns["bytes"], precision).sum())
    device_ns, gaps_ns = steps.total("device_ns"), steps.total("gap_ns")
    return {
        "roofline_percent": 100 * needed_ns / wall_ns,
        "mfu_percent": 100 * ceilings.mfu(steps.total("flops"), wall_ns, precision),
        "mbu_percent": 100 * ceilings.mbu(steps.total("bytes"), wall_ns),
        "device_idle_percent": 100 * gaps_ns / max(1, device_ns + gaps_ns),
    }
