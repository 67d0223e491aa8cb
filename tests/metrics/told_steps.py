"""Records of steps as the loop would have told them."""

from collections.abc import Sequence

import numpy as np

from metrics.records import STAGES, StepRecord
from metrics.step_batch import COSTS, NOTHING, NUMBERS, OTHERS, Makeup, StepBatch, Steps


def packed(records: Sequence[StepRecord]) -> StepBatch:
    """As they travel, each with a makeup of its own; their costs do not."""
    numbers, makeups, others = [], [], []
    for row, record in enumerate(records):
        own = dict(zip((f"stage_{stage}_ns" for stage in STAGES), record.stages, strict=True))
        numbers.append([own[name] if name in own else _number(getattr(record, name)) for name in NUMBERS])
        makeups.append(Makeup(row, record.request_ids, record.kinds, record.new_tokens, record.past_tokens))
        others += [(row, name, value) for name, no in OTHERS.items() if (value := getattr(record, name)) != no]
    return StepBatch(np.array(numbers, np.int64).tobytes(), makeups, others)


def steps_of_records(records: Sequence[StepRecord]) -> Steps:
    """With the costs that the records tell."""
    steps = Steps.told(packed(records))
    for name in COSTS:
        steps[name][:] = [_number(getattr(record, name)) for record in records]
    return steps


def _number(value: int | None) -> int:
    return NOTHING if value is None else value
