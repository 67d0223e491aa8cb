"""A batch of step records by columns.

A loop makes hundreds of steps a second. The exporter and the cost model read a batch as arrays: that costs a few
operations for all of its steps, not hundreds for each.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.metrics.records import COMPOSITIONS, KINDS, PROMPT_KINDS, STAGES, StepRecord
from sojourn.metrics.records.step import Costs, default_of, values_of

if TYPE_CHECKING:
    import pandas as pd

UNKNOWN = -(2**63)  # in the place of a number that is not known
EAGER = "eager"  # the graph of a step that replayed none

# Columns of the table `steps` that a row of `rows_of` has.
ROW_COLUMNS = (
    "step", "device_ns", "sampling_ns", "new_tokens", "past_tokens", "kinds", "graph", "padding_tokens", "logit_rows",
    "flops_adapters", "load_ns", "store_ns", *(f"stage_{stage}_ns" for stage in STAGES),
)  # fmt: skip

_KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
_IS_PROMPT = np.array([kind in PROMPT_KINDS for kind in KINDS], np.int64)


class Steps:
    """Columns of int64 [steps] by the names of StepRecord's columns, made of the records when they are first read."""

    def __init__(self, records: Sequence[StepRecord]):
        self.records = records
        self._columns: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, name: str) -> np.ndarray:
        """A field that holds a number; UNKNOWN stands for None."""
        if name not in self._columns:
            values = self.values(name)
            numbers = [UNKNOWN if value is None else value for value in values] or self._default(name)
            self._columns[name] = np.array(numbers, np.int64)
        return self._columns[name]

    def fill_costs(self, **columns: np.ndarray) -> None:
        """Sets these costs in every record; an UNKNOWN expectation stands for None."""
        self._columns |= {name: np.asarray(column).astype(np.int64) for name, column in columns.items()}
        costs = [Costs() for _ in self.records]
        for name in columns:
            for each, value in zip(costs, self._columns[name].tolist(), strict=True):
                setattr(each, name, value)
        for record, each in zip(self.records, costs, strict=True):
            if each.predicted_ns == UNKNOWN:
                each.predicted_ns = None
            record.costs = each

    @cached_property
    def stages(self) -> np.ndarray:
        """Nanoseconds [STAGES, steps]."""
        return np.array([record.stages for record in self.records], np.int64).T

    @cached_property
    def is_eager(self) -> np.ndarray:
        """Whether a step replayed no graph, bool [steps]."""
        return np.array([record.graph == EAGER for record in self.records])

    @cached_property
    def sequences(self) -> np.ndarray:
        """Sequences in each step [steps]."""
        return np.array([len(record.kinds) for record in self.records], np.int64)

    @cached_property
    def new_tokens(self) -> np.ndarray:
        """Of every sequence of every step, one step after the other [sequences of all steps]."""
        return self._joined(record.new_tokens for record in self.records)

    @cached_property
    def past_tokens(self) -> np.ndarray:
        return self._joined(record.past_tokens for record in self.records)

    @cached_property
    def kinds(self) -> np.ndarray:
        """Places in KINDS."""
        return self._joined(map(_KIND_CODES.__getitem__, record.kinds) for record in self.records)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens computed in each step [steps]."""
        return self.summed(self.new_tokens)

    @cached_property
    def compositions(self) -> np.ndarray:
        """Places in COMPOSITIONS [steps]; one place too many for a step without sequences."""
        prompts = self.summed(_IS_PROMPT[self.kinds])
        prefill, decode, mixed = map(COMPOSITIONS.index, ("prefill", "decode", "mixed"))
        composition = np.where(prompts == 0, decode, np.where(prompts == self.sequences, prefill, mixed))
        return np.where(self.sequences == 0, len(COMPOSITIONS), composition)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Values of every sequence of every step → their sum in each step [steps]."""
        sums = np.concatenate(([0], np.cumsum(values)))
        return np.diff(sums[np.concatenate(([0], np.cumsum(self.sequences)))])

    def samples(self, field: str) -> list[Any]:
        """All entries of a field that holds a list."""
        return list(chain.from_iterable(self.values(field)))

    def preemptions(self) -> list[tuple[str, str, int]]:
        """The preempted request, the request that needed its blocks, and the computed positions in them."""
        fields = ("preempted_ids", "preempted_for", "preempted_tokens")
        return list(zip(*map(self.samples, fields), strict=True))

    def values(self, column: str) -> Iterable[Any]:
        """Of every record; none where all of them lack the part that has the column."""
        if self.records and isinstance(self.records[0], StepRecord):
            return values_of(self.records, column) or ()
        return map(attrgetter(column), self.records)  # rows of a table

    def _default(self, column: str) -> list[int]:
        value = default_of(column) if self.records else 0
        return [UNKNOWN if value is None else value] * len(self.records)

    def _joined(self, values: Iterable[Iterable[int]]) -> np.ndarray:
        return np.fromiter(chain.from_iterable(values), np.int64)


def rows_of(table: "pd.DataFrame") -> list[Any]:
    """The rows of the table `steps`, in their order, as `Steps` reads records. What a run of an older version lacks: a
    step has a row of logits for each sequence, no padding, no adapters and no KV tiers."""
    known = table.reindex(columns=list(ROW_COLUMNS)).sort_values("step")
    known["logit_rows"] = known.logit_rows.fillna(known.kinds.map(len))
    for name in ("padding_tokens", "flops_adapters", "load_ns", "store_ns"):
        known[name] = known[name].fillna(0).astype("int64")
    if known.sampling_ns.isna().any():
        known["sampling_ns"] = known.sampling_ns.astype(object).where(known.sampling_ns.notna(), None)
    return list(known.itertuples(index=False))
