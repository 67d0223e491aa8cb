"""Records of steps as columns."""

from collections.abc import Sequence

import numpy as np

from metrics.records import STAGES, StepRecord
from metrics.steps import COSTS, NOTHING, NUMBERS, OTHERS, Makeup, Steps


def uncosted(records: Sequence[StepRecord]) -> Steps:
    """As they arrive, each with a makeup of its own; their costs do not."""
    makeups, others = [], []
    for row, record in enumerate(records):
        makeups.append(Makeup(row, record.request_ids, record.kinds, record.new_tokens, record.past_tokens))
        others += [(row, name, value) for name, no in OTHERS.items() if (value := getattr(record, name)) != no]
    steps = Steps.uncosted(len(records), makeups, others)
    steps.stages[:] = np.array([record.stages for record in records], np.int64).reshape(-1, len(STAGES)).T
    for name in NUMBERS:
        if not name.startswith("stage_"):
            steps[name][:] = [_number(getattr(record, name)) for record in records]
    return steps


def steps_of_records(records: Sequence[StepRecord]) -> Steps:
    """With the costs that the records tell."""
    steps = uncosted(records)
    for name in COSTS:
        steps[name][:] = [_number(getattr(record, name)) for record in records]
    return steps


def _number(value: int | None) -> int:
    return NOTHING if value is None else value
