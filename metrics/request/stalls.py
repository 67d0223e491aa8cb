"""Steps in which the engine stood still, and whose books the time belongs to: to `compute.stall`, and to no request.

A stalled step took far longer than what it held explains: the process was stopped, another process had its cores, a
kernel was compiled, memory was swapped in. Its requests had no part in that, and others waited through it. So what is
beyond the bound of the step model is taken out of the accounts of everybody who was in the server, and off the clock of
whoever is blamed (`removed`). All readers of a run see its requests like that, whoever recorded them, and when.

The bound is the step model's own: the prediction, times the spread of the run's own residuals. A step without a
prediction is held against the slow steps of its run, and what its FLOPs may cost at their rate. A device that has
become slower has many such steps in a row: that is no stall.

What this cannot tell: why. And where within the step the engine stood still: what the step computed is taken to come
first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, ACCOUNTS, OWN_WORK, Account
from sojourn.metrics.records import KINDS
from sojourn.metrics.request.timeline import NOBODY, Timeline, prompt_flops, timeline
from sojourn.metrics.request.waits import Family, Waits, account_of, encoded_at, reasons, waits

FEWEST_STEPS = 50  # fewer do not tell what is usual
DEVIATIONS = 3.0  # robust standard deviations of the logarithm of measured / predicted
LEAST_SPREAD = 0.05
USUAL_SHARE = 0.95  # of the steps, those that bound what one without a prediction may take
FAR_BEYOND = 4.0  # times the bound: a stall, and not a wrong prediction
LEAST_NS = 100_000_000  # beyond it
NEAR, MOST_NEAR = 8, 4  # steps before and behind; more stalls among them are a slower device
PARTS = ("communication_ns", "bubble_ns", "load_ns", "store_ns")  # of the device's time, booked by themselves
COLUMNS = ("step", "device_ns", "predicted_ns", "flops", "sampling_ns", *PARTS)
STAMPS = (
    "arrived_ns", "encoded_ns", "queued_ns", "scheduled_ns", "first_written_ns", "written_ns", "finished_ns",
)  # fmt: skip
STALL = ACCOUNTS[Account.COMPUTE_STALL]


@dataclass(frozen=True, slots=True)
class Stalls:
    """K stalled steps of a run, in their order. Times are ns."""

    at: np.ndarray  # [K] positions in the steps, ordered by number
    begin_ns: np.ndarray  # [K] the step had taken as long as what it held explains
    end_ns: np.ndarray  # [K] the device was done with it

    def __len__(self) -> int:
        return len(self.at)

    @property
    def length_ns(self) -> np.ndarray:
        return self.end_ns - self.begin_ns

    def removed(self, ns: np.ndarray) -> np.ndarray:
        """Moments on a clock that stands while the engine does."""
        ns = np.asarray(ns, dtype="int64")
        spans = zip(self.begin_ns.tolist(), self.end_ns.tolist(), strict=True)
        inside = [np.clip(ns - begin, 0, end - begin) for begin, end in spans]
        return ns - sum(inside, np.zeros_like(ns))

    def of_step(self, at: int) -> int:
        """How long the engine stood still in a step."""
        return int(self.length_ns[self.at == at].sum())

    def off(self, line: Timeline) -> Timeline:
        """The steps on the clock without stalls."""
        clocked = ("begin_ns", "end_ns", "planned_ns", "device_begin_ns", "device_end_ns", "committed_ns")
        work = line.work_ns.copy()
        work[self.at] = np.maximum(work[self.at] - self.length_ns, 0)
        return replace(line, work_ns=work, **{name: self.removed(getattr(line, name)) for name in clocked})

    def off_requests(self, requests: pd.DataFrame) -> pd.DataFrame:
        """The requests on that clock."""
        found = {}
        for name in STAMPS:
            if name in requests:
                known = requests[name].notna().to_numpy()
                moments = requests[name].fillna(0).to_numpy(dtype="int64")
                found[name] = requests[name].mask(known, np.where(known, self.removed(moments), 0))
        if "token_ns" in requests:
            found["token_ns"] = [None if cell is None else self.removed(cell) for cell in requests.token_ns]
        return requests.assign(**found)


def stalled(steps: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the stalled steps of a table with COLUMNS, ordered by number, and how long each stood still."""
    steps = steps.sort_by("step")

    def number(name: str) -> np.ndarray:
        return np.nan_to_num(steps[name].cast(pa.float64()).to_numpy(), nan=0.0)

    device, predicted, flops = (number(name) for name in ("device_ns", "predicted_ns", "flops"))
    measured = sum((np.maximum(number(name), 0) for name in ("sampling_ns", *PARTS)), np.zeros(len(device)))
    bound = _bound_ns(device, predicted, flops)
    beyond = np.minimum(device - bound, device - measured)
    found = (beyond >= LEAST_NS) & (device >= FAR_BEYOND * bound)
    near = np.convolve(found, np.ones(2 * NEAR + 1), mode="full")[NEAR : len(found) + NEAR] if found.any() else found
    at = np.flatnonzero(found & (near <= MOST_NEAR))
    return at, beyond[at].astype("int64")


def _bound_ns(device: np.ndarray, predicted: np.ndarray, flops: np.ndarray) -> np.ndarray:
    """[N] what each step may take by what it held; infinite where the run does not tell."""
    bound = np.full(len(device), np.inf)
    if len(device) < FEWEST_STEPS:
        return bound
    dense = np.divide(device, flops, out=np.zeros(len(device)), where=flops > 0)
    bound = np.quantile(device, USUAL_SHARE) + flops * np.quantile(dense, USUAL_SHARE)
    known = (predicted > 0) & (device > 0)
    if known.sum() >= FEWEST_STEPS:
        ratio = np.log(device[known] / predicted[known])
        middle = float(np.median(ratio))
        spread = max(1.4826 * float(np.median(np.abs(ratio - middle))), LEAST_SPREAD)  # 1.4826: MAD of a normal = 1 σ
        bound[known] = predicted[known] * np.exp(max(middle, 0.0) + DEVIATIONS * spread)
    return bound


def stalls_of(line: Timeline, steps: pa.Table) -> Stalls:
    """The stalls of the steps that a timeline was made of."""
    at, length = stalled(steps)
    return Stalls(at, line.device_end_ns[at] - length, line.device_end_ns[at])


class Taken(NamedTuple):
    """Time of one request that a stall took out of an account."""

    victim: int
    account: str
    reason: str  # of a wait
    ns: float
    before_text: bool  # it delayed the first text


def without_stalls(requests: pd.DataFrame, steps: pa.Table, shape: ModelShape | None) -> pd.DataFrame:
    """The requests with the time of stalls in `compute.stall`: a ledger has the sum that it had, and no account falls
    below nought. Of several records of a request the last one counts."""
    line, last = timeline(steps), ~requests.request_id.duplicated(keep="last")
    counted = requests[last].reset_index(drop=True)
    stalls, found = stalls_of(line, steps), waits(line, counted)
    names = [f"{prefix}_{info.column}" for prefix in ("ledger", "ttft") for info in ACCOUNTS]
    moved = {name: counted[name].to_numpy("float64", na_value=np.nan).copy() for name in names if name in counted}
    for name in moved:
        if name.endswith(STALL.column):
            moved[name] = np.nan_to_num(moved[name])  # runs of before have no such account
    waited = [reasons(cell) for cell in counted.waits]
    for taken in _taken(line, found, stalls, counted, shape):
        column = ACCOUNT_BY_NAME[taken.account].column
        ns = _move(moved, "ledger", column, taken.victim, taken.ns)
        if taken.before_text:
            _move(moved, "ttft", column, taken.victim, taken.ns)
        if taken.reason == "left out" and (rest := taken.ns - ns) > 1:  # it had its place while the step was computed
            ns = _move(moved, "ledger", ACCOUNTS[Account.REQUEST_QUEUE].column, taken.victim, rest)
            if taken.before_text:
                _move(moved, "ttft", ACCOUNTS[Account.REQUEST_QUEUE].column, taken.victim, rest)
            taken = taken._replace(reason="step")
        if taken.reason in waited[taken.victim]:
            waited[taken.victim][taken.reason] = max(0, waited[taken.victim][taken.reason] - round(ns))
    changed = requests.copy()
    for name, values in moved.items():
        column = changed[name].astype("Int64")
        column[last] = pd.array(values, dtype="Float64").astype("Int64")
        changed[name] = column
    column = changed.waits.astype(object)
    column[last] = pd.Series(waited, index=requests.index[last], dtype=object)
    return changed.assign(waits=column)


def _move(moved: dict[str, np.ndarray], prefix: str, column: str, victim: int, ns: float) -> float:
    source, target = f"{prefix}_{column}", f"{prefix}_{STALL.column}"
    if source not in moved or target not in moved:
        return 0.0
    part = min(round(ns), max(np.nan_to_num(moved[source][victim]), 0.0))
    moved[source][victim] -= part
    moved[target][victim] += part
    return float(part)


def _taken(
    line: Timeline, found: Waits, stalls: Stalls, requests: pd.DataFrame, shape: ModelShape | None
) -> Iterator[Taken]:
    prompts = dict(zip(requests.request_id, requests.prompt_tokens.fillna(0).astype("int64"), strict=True))
    flops = prompt_flops(line, shape, prompts)
    first_token = np.array([cell[0] if cell is not None and len(cell) else np.iinfo("int64").max
                            for cell in (requests.token_ns if "token_ns" in requests else [])], "int64")  # fmt: skip
    if not len(first_token):
        first_token = np.full(len(requests), np.iinfo("int64").max)
    for at, begin, end in zip(stalls.at, stalls.begin_ns, stalls.end_ns, strict=True):
        parts = (
            *_of_members(line, found, flops, int(at), int(end - begin)),
            *_of_absent(found, int(at), int(end - begin)),
            *_of_waiting(line, found, int(begin), int(end)),
        )
        for victim, account, reason, ns in (*parts, *_of_admission(requests, parts, int(begin), int(end))):
            yield Taken(victim, account, reason, ns, bool(end <= first_token[victim]))


def _of_admission(
    requests: pd.DataFrame, parts: Sequence[tuple[int, str, str, float]], begin: int, end: int
) -> Iterator[tuple[int, str, str, float]]:
    """Handed over meanwhile: the loop could not take it in. What the other parts do not hold of that time."""
    encoded = encoded_at(requests)
    admitted = encoded + requests.ledger_request_admission_ns.astype("float64").fillna(0).to_numpy()
    inside = np.minimum(admitted, end) - np.maximum(encoded, begin)
    for victim, _, _, ns in parts:
        inside[victim] = min(inside[victim], end - begin - ns)
    for victim in np.flatnonzero(inside > 0).tolist():
        yield victim, "request.admission", "", float(inside[victim])


def _of_members(
    line: Timeline, found: Waits, flops: np.ndarray, at: int, ns: int
) -> Iterator[tuple[int, str, str, float]]:
    """In the step: others' prompts and its own work lose alike, as they were booked."""
    first, last = np.searchsorted(line.at, [at, at + 1])
    whole = max(float(line.flops[at]), float(flops[first:last].sum()), 1.0)
    here = (found.entry >= first) & (found.entry < last)
    for entry, victim in zip(found.entry[here].tolist(), found.entry_victim[here].tolist(), strict=True):
        others = float(flops[first:last].sum() - flops[entry]) / whole
        yield victim, "request.interference", "", ns * others
        yield victim, ACCOUNTS[OWN_WORK[KINDS[line.kind[entry]]]].name, "", ns * (1 - others)


def _of_absent(found: Waits, at: int, ns: int) -> Iterator[tuple[int, str, str, float]]:
    absent = (found.absences.first <= at) & (at < found.absences.last)
    for victim in found.absences.victim[absent].tolist():
        yield victim, "request.interference", "left out", float(ns)


def _of_waiting(line: Timeline, found: Waits, begin: int, end: int) -> Iterator[tuple[int, str, str, float]]:
    spans = found.spans[(found.spans.begin_ns < end) & (found.spans.end_ns > begin)]
    step = max(int(np.searchsorted(line.planned_ns, begin, side="right")) - 1, 0)
    for span in spans:
        family = Family(span.family)
        account, reason = account_of(family, str(line.reason[step]))
        if family is Family.ASIDE and span.taker != NOBODY:
            reason = "grammar" if span.taker == found.sequence[span.victim] else "leader"
        inside = min(int(span.end_ns), end) - max(int(span.begin_ns), begin)
        yield int(span.victim), account, reason, float(inside)
