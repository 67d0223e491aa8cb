"""Engine steps by columns: how whoever folds, shows or records them reads them.

A loop makes hundreds of steps a second, and whatever is done for each of them takes time from the next one. So a step
is a row of numbers, and what most steps have not, or share with the step before, is kept once. A batch of steps then
costs a few operations on arrays, not hundreds on objects. `StepRecord` is the same step as one object.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from metrics.records import COMPOSITIONS, KINDS, PROMPT_KINDS, SCHEMAS, STAGES, StepRecord

NOTHING = -(2**63)  # in the place of a number that is not known

# The numbers of a step that the loop knows ...
NUMBERS = (
    "step", "begin_ns", "end_ns", *(f"stage_{stage}_ns" for stage in STAGES), "device_ns", "padding_tokens", "budget",
    "waiting", "evicted_blocks", "blocks_free", "blocks_active", "blocks_reusable", "blocks_pinned", "gap_ns",
    "overrun_tokens", "emitted_tokens", "slots_written", "forgotten_blocks", "planned_ns", "device_end_ns",
    "sampling_ns", "logit_rows",
)  # fmt: skip
# ... and those that are worked out where a batch arrives (metrics/compute/step_costs.py).
COSTS = ("flops", "bytes", "predicted_ns", "flops_attention", "flops_mlp", "flops_head")
# What most steps have not: it is only kept where it is more than this.
OTHERS: dict[str, Any] = {
    "graph": "eager", "refusals": {}, "preempted_ids": [], "reuse_gap_ns": [], "reuse_distance_blocks": [],
    "evicted_age_ns": [], "evicted_idle_ns": [], "preempted_for": [], "preempted_tokens": [], "entropy_millinats": [],
    "kept_mass_ppm": [],
}  # fmt: skip

_PLACE = {name: place for place, name in enumerate(NUMBERS + COSTS)}
_PLAIN = [name for name in NUMBERS + COSTS if not name.startswith("stage_")]
_FIRST_STAGE = _PLACE[f"stage_{STAGES[0]}_ns"]
_KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
_PROMPT_CODES = [_KIND_CODES[kind] for kind in PROMPT_KINDS]


Others = list[tuple[int, str, Any]]  # (row, field of OTHERS, value)


class Makeup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who took part in a step, and in the steps after it up to the next makeup: each of those computed one token of
    each, after one more past token than the step before."""

    first_row: int
    request_ids: list[str]
    kinds: list[str]
    new_tokens: list[int]
    past_tokens: list[int]


class Steps:
    """A batch of steps by columns. `numbers` is int64 [NUMBERS + COSTS, steps]."""

    def __init__(self, numbers: np.ndarray, makeups: list[Makeup], others: Others):
        self.numbers = numbers
        self.makeups = makeups
        self.others = others

    @classmethod
    def uncosted(cls, count: int, makeups: list[Makeup], others: Others) -> "Steps":
        """So many steps as they arrive: NUMBERS are to be filled in, and nothing is said of what they cost."""
        steps = cls.empty(count, makeups, others)
        steps.numbers[len(NUMBERS) :] = 0
        steps["predicted_ns"][:] = NOTHING
        return steps

    @classmethod
    def empty(cls, count: int, makeups: list[Makeup], others: Others) -> "Steps":
        """So many steps, of which no number is known."""
        return cls(np.full((len(NUMBERS) + len(COSTS), count), NOTHING, np.int64), makeups, others)

    def __len__(self) -> int:
        return self.numbers.shape[1]

    def __getitem__(self, name: str) -> np.ndarray:
        """A column of numbers [steps], to read or to fill."""
        return self.numbers[_PLACE[name]]

    @property
    def stages(self) -> np.ndarray:
        """Nanoseconds [STAGES, steps]."""
        return self.numbers[_FIRST_STAGE : _FIRST_STAGE + len(STAGES)]

    @cached_property
    def _repeats(self) -> list[int]:
        """Steps that each makeup stands for."""
        ends = [makeup.first_row for makeup in self.makeups[1:]] + [len(self)]
        return [end - makeup.first_row for makeup, end in zip(self.makeups, ends, strict=True)]

    @cached_property
    def sequences(self) -> np.ndarray:
        """How many took part in each step [steps]."""
        return np.repeat([len(makeup.kinds) for makeup in self.makeups], self._repeats)

    @cached_property
    def first_places(self) -> np.ndarray:
        """Where each step's own begin in `new_tokens`, `past_tokens` and `kinds` [steps + 1]."""
        return np.concatenate(([0], np.cumsum(self.sequences)))

    @cached_property
    def new_tokens(self) -> np.ndarray:
        """Of every sequence of every step, one step after the other."""
        return self._tiled([makeup.new_tokens for makeup in self.makeups])

    @cached_property
    def past_tokens(self) -> np.ndarray:
        firsts = np.repeat([makeup.first_row for makeup in self.makeups], self._repeats)
        since = np.repeat(np.arange(len(self)) - firsts, self.sequences)  # steps since the makeup's own
        return self._tiled([makeup.past_tokens for makeup in self.makeups]) + since

    @cached_property
    def kinds(self) -> np.ndarray:
        """Places in KINDS."""
        return self._tiled([[_KIND_CODES[kind] for kind in makeup.kinds] for makeup in self.makeups])

    @cached_property
    def tokens(self) -> np.ndarray:
        """Computed in each step [steps]."""
        return self.summed(self.new_tokens)

    @cached_property
    def compositions(self) -> np.ndarray:
        """Places in COMPOSITIONS [steps]; of a step that nobody took part in, one too many."""
        prompts = self.summed(np.isin(self.kinds, _PROMPT_CODES).astype(np.int64))
        prefill, decode, mixed = map(COMPOSITIONS.index, ("prefill", "decode", "mixed"))
        made_of = np.where(prompts == 0, decode, np.where(prompts == self.sequences, prefill, mixed))
        return np.where(self.sequences == 0, len(COMPOSITIONS), made_of)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Values of every sequence of every step → their sum in each step [steps]."""
        sums = np.concatenate(([0], np.cumsum(values)))
        return np.diff(sums[self.first_places])

    @cached_property
    def others_by_row(self) -> dict[int, dict[str, Any]]:
        """Row → field of OTHERS → what the step has of it."""
        found: dict[int, dict[str, Any]] = {}
        for row, field, value in self.others:
            found.setdefault(row, {})[field] = value
        return found

    def preemptions(self) -> list[tuple[str, str, int]]:
        """Of all steps: the victim, the request that needed its blocks, and the computed positions in them."""
        fields = ("preempted_ids", "preempted_for", "preempted_tokens")
        if not any(field == fields[0] for _, field, _ in self.others):
            return []
        rows = self.others_by_row.values()
        return [found for own in rows if fields[0] in own for found in zip(*map(own.get, fields), strict=True)]

    def record(self, row: int) -> StepRecord:
        makeup = self.makeups[bisect_right(self.makeups, row, key=attrgetter("first_row")) - 1]
        numbers, later = self.numbers[:, row].tolist(), row - makeup.first_row
        own = {name: _known(numbers[_PLACE[name]]) for name in _PLAIN} | OTHERS | self.others_by_row.get(row, {})
        return StepRecord(
            **own,
            stages=numbers[_FIRST_STAGE : _FIRST_STAGE + len(STAGES)],
            request_ids=makeup.request_ids,
            kinds=makeup.kinds,
            new_tokens=makeup.new_tokens,
            past_tokens=[past + later for past in makeup.past_tokens],
        )

    def records(self) -> list[StepRecord]:
        return [self.record(row) for row in range(len(self))]

    def table(self) -> pa.Table:
        """As a table of SCHEMAS["steps"]."""
        schema = SCHEMAS["steps"]
        made: dict[str, pa.Array] = {name: _nullable(self[name]) for name in NUMBERS + COSTS}
        offsets = pa.array(self.first_places.astype(np.int32))
        made["new_tokens"] = pa.ListArray.from_arrays(offsets, pa.array(self.new_tokens))
        made["past_tokens"] = pa.ListArray.from_arrays(offsets, pa.array(self.past_tokens))
        made["kinds"] = pa.ListArray.from_arrays(offsets, pa.array(KINDS).take(pa.array(self.kinds)))
        made["request_ids"] = pa.ListArray.from_arrays(offsets, self._request_ids())
        told: dict[str, list[tuple[int, Any]]] = {name: [] for name in OTHERS}
        for row, field, value in self.others:
            told[field].append((row, value))
        made["graph"] = self._graphs(told.pop("graph"))
        for name, values in told.items():
            made[name] = self._sparse(values, schema.field(name).type)
        return pa.Table.from_arrays([made[name] for name in schema.names], schema=schema)

    def _graphs(self, told: list[tuple[int, str]]) -> pa.Array:
        if not told:
            return pa.repeat(OTHERS["graph"], len(self))
        names = [OTHERS["graph"]] * len(self)
        for row, name in told:
            names[row] = name
        return pa.array(names)

    def _sparse(self, told: list[tuple[int, Any]], kind: pa.DataType) -> pa.Array:
        """Lists, or maps, that are empty in all rows but some."""
        lengths = np.zeros(len(self) + 1, np.int32)
        for row, value in told:
            lengths[row + 1] = len(value)
        offsets, values = pa.array(np.cumsum(lengths, dtype=np.int32)), [value for _, value in told]
        if pa.types.is_map(kind):
            keys = pa.array([key for value in values for key in value], kind.key_type)
            items = pa.array([item for value in values for item in value.values()], kind.item_type)
            return pa.MapArray.from_arrays(offsets, keys, items)
        return pa.ListArray.from_arrays(
            offsets, pa.array([each for value in values for each in value], kind.value_type)
        )

    def _request_ids(self) -> pa.Array:
        ids = pa.array([request_id for makeup in self.makeups for request_id in makeup.request_ids], pa.string())
        return ids.take(pa.array(self._places))

    @cached_property
    def _places(self) -> np.ndarray:
        """Of every sequence of every step: its place among those of all makeups, one after the other."""
        widths = [len(makeup.kinds) for makeup in self.makeups]
        begins = np.repeat(np.cumsum([0, *widths])[:-1], self._repeats)  # of each step's makeup
        return np.arange(self.first_places[-1]) + np.repeat(begins - self.first_places[:-1], self.sequences)

    def _tiled(self, values: Iterable[Sequence[int]]) -> np.ndarray:
        """Values of each makeup's sequences, once for each of its steps."""
        return np.fromiter(chain.from_iterable(values), np.int64)[self._places]


def _known(value: int) -> int | None:
    return None if value == NOTHING else value


def _nullable(column: np.ndarray) -> pa.Array:
    unknown = column == NOTHING
    return pa.array(column, mask=unknown if unknown.any() else None)
