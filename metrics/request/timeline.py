"""The steps of a run as arrays on one clock: when each was planned and computed, who took part, who was put aside.

Everything that is said afterwards about waiting (`waits`, `blame`, `token_gaps`) reads this. Lists of
requests are kept flat, one entry a request and step, so that a million steps need no loop.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sojourn.metrics.compute.cost_model import ModelShape, request_flops
from sojourn.metrics.records import KINDS

DECODE = KINDS.index("decode")
PREFILL = KINDS.index("prefill")
NOBODY = -1


@dataclass(frozen=True, slots=True)
class Timeline:
    """N steps in their order, M entries (a request in a step) in order of steps, P preemptions. Times are ns.

    A request is a *sequence* of the engine: the further choices of a call are `<request_id>#<number>`. `owner` maps
    them to their call.
    """

    step: np.ndarray  # [N] number of the step
    begin_ns: np.ndarray  # [N] of the turns of the loop that its record stands for
    end_ns: np.ndarray
    planned_ns: np.ndarray  # [N] when it was decided what it holds; rising
    device_begin_ns: np.ndarray
    device_end_ns: np.ndarray  # [N] rising
    work_ns: np.ndarray  # [N] of the device, without the draw of the next tokens
    committed_ns: np.ndarray  # [N] when its tokens left the loop
    receive_ns: np.ndarray  # [N] stage
    schedule_ns: np.ndarray  # [N] stage
    predicted_ns: np.ndarray  # [N] device time that the step model expects; NaN where it knew too little
    reason: np.ndarray  # [N] why the head of the line was not admitted, "" where nobody waited
    flops: np.ndarray  # [N]
    at: np.ndarray  # [M] which step, 0 to N - 1
    who: np.ndarray  # [M] which sequence, 0 to S - 1
    new: np.ndarray  # [M] tokens
    past: np.ndarray  # [M] tokens
    kind: np.ndarray  # [M] index into KINDS
    preempted_at: np.ndarray  # [P] which step's plan
    preempted: np.ndarray  # [P] which sequence
    preempted_for: np.ndarray  # [P] whose need took its blocks, NOBODY where the record does not tell
    sequences: np.ndarray  # [S] names
    owner: np.ndarray  # [S] index into `calls`
    calls: np.ndarray  # names of requests as clients know them

    def __len__(self) -> int:
        return len(self.step)

    @property
    def device_ns(self) -> np.ndarray:
        return self.device_end_ns - self.device_begin_ns

    @property
    def is_prompt(self) -> np.ndarray:
        """[M] whether an entry is prompt work, which others in the step wait for: whatever is no plain decode."""
        return self.kind != DECODE


def timeline(steps: pa.Table) -> Timeline:
    """The timeline of a `steps` table (SCHEMAS["steps"]; null where an old run lacks a column)."""
    steps = steps.sort_by("step")

    def number(name: str, missing: int = 0) -> np.ndarray:
        return steps[name].cast(pa.int64()).fill_null(missing).to_numpy()

    end_ns, device_ns = number("end_ns"), number("device_ns")
    out_ns = number("stage_commit_ns") + number("stage_publish_ns")
    device_end = _recorded_or(number("device_end_ns"), end_ns - out_ns)
    sampling = _recorded_or(
        number("sampling_ns", missing=-1), np.minimum(number("stage_sample_ns"), device_ns), least=0
    )
    planned = number("begin_ns") + number("stage_receive_ns") + number("stage_schedule_ns")
    ids, new, past = _flat(steps, "request_ids"), _flat(steps, "new_tokens"), _flat(steps, "past_tokens")
    preempted_ids, taker = _flat(steps, "preempted_ids"), _flat(steps, "preempted_for")
    kinds = _flat(steps, "kinds").cast(pa.string())
    names, who, preempted, preempted_for = _names(ids, preempted_ids, taker)
    import pandas as pd  # the server's front imports this module, and need not wait for pandas

    owner, calls = pd.factorize(np.array([call_of(name) for name in names], dtype=object))
    return Timeline(
        step=number("step"),
        begin_ns=number("begin_ns"),
        end_ns=end_ns,
        planned_ns=np.maximum.accumulate(_recorded_or(number("planned_ns"), planned)) if len(steps) else planned,
        device_begin_ns=device_end - device_ns,
        device_end_ns=np.maximum.accumulate(device_end) if len(steps) else device_end,
        work_ns=device_ns - sampling,
        committed_ns=end_ns - number("stage_publish_ns"),
        receive_ns=number("stage_receive_ns"),
        schedule_ns=number("stage_schedule_ns"),
        predicted_ns=steps["predicted_ns"].cast(pa.float64()).to_numpy(),
        reason=_reasons(steps["refusals"]),
        flops=number("flops").astype("float64"),
        at=_parents(steps, "request_ids"),
        who=who,
        new=new.to_numpy(zero_copy_only=False).astype("int64"),
        past=past.to_numpy(zero_copy_only=False).astype("int64"),
        kind=pc.index_in(kinds, pa.array(KINDS)).fill_null(DECODE).to_numpy(zero_copy_only=False),
        preempted_at=_parents(steps, "preempted_ids"),
        preempted=preempted,
        preempted_for=preempted_for if len(preempted_for) == len(preempted) else np.full(len(preempted), NOBODY),
        sequences=names,
        owner=owner,
        calls=calls,
    )


def call_of(sequence: str) -> str:
    """The request that a sequence of the engine belongs to."""
    return sequence.split("#", 1)[0]


def prompt_flops(line: Timeline, shape: ModelShape | None, prompt_tokens: dict[str, int]) -> np.ndarray:
    """FLOPs [M] of every entry of prompt work, 0 for decodes.

    `prompt_tokens` by call: the last chunk of a prompt pays for the logits, too. Without a shape a step's FLOPs are
    divided by tokens, which is right but for attention and the logits.
    """
    result = np.zeros(len(line.at))
    chosen = np.flatnonzero(line.is_prompt)
    if not len(chosen):
        return result
    new, past = line.new[chosen], line.past[chosen]
    if shape is None:
        tokens = np.bincount(line.at, weights=line.new, minlength=len(line))
        result[chosen] = line.flops[line.at[chosen]] * new / np.maximum(tokens[line.at[chosen]], 1)
        return result
    whole = np.array([prompt_tokens.get(name, NOBODY) for name in line.calls])[line.owner[line.who[chosen]]]
    draws = (past + new == whole) & (line.kind[chosen] == PREFILL)
    work, place = np.unique(np.stack([new, past, draws]), axis=1, return_inverse=True)
    costs = [request_flops(shape, int(n), int(p), int(samples)) for n, p, samples in work.T]
    result[chosen] = np.array(costs, dtype="float64")[place.reshape(-1)]
    return result


def _recorded_or(values: np.ndarray, otherwise: np.ndarray, least: int = 1) -> np.ndarray:
    """The recorded value; `otherwise` in a run of an older version, which lacks the column."""
    return np.where(values >= least, values, otherwise)


def _flat(steps: pa.Table, name: str) -> pa.Array:
    return steps[name].combine_chunks().flatten()


def _parents(steps: pa.Table, name: str) -> np.ndarray:
    """The step of each value of `_flat`."""
    return pc.list_parent_indices(steps[name].combine_chunks()).to_numpy(zero_copy_only=False)


def _names(*lists: pa.Array) -> tuple[np.ndarray, ...]:
    """All names once, and each list as positions among them; NOBODY for "" and null."""
    lists = tuple(pc.fill_null(part.cast(pa.string()), "") for part in lists)
    coded = pa.chunked_array(lists).combine_chunks().dictionary_encode()
    names = np.array(coded.dictionary.to_pylist(), dtype=object)
    codes = coded.indices.to_numpy(zero_copy_only=False).astype("int64")
    empty = np.flatnonzero(names == "")
    if len(empty):
        codes = np.where(codes == empty[0], NOBODY, codes)
    ends = np.cumsum([len(part) for part in lists])[:-1]
    return names, *np.split(codes, ends)


def _reasons(refusals: pa.ChunkedArray) -> np.ndarray:
    """The first reason of each step: the scheduler names that of the head of the line first."""
    if not len(refusals):
        return np.array([], dtype=object)
    maps = refusals.combine_chunks()
    lengths = np.diff(maps.offsets.to_numpy())
    keys = np.array([*maps.keys.to_pylist(), ""], dtype=object)
    first = np.where(lengths > 0, maps.offsets.to_numpy()[:-1], len(keys) - 1)
    return keys[first]
