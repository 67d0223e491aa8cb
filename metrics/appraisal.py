"""What a step cost and what it should have cost, worked out where it delays nothing: where its record arrives."""

import msgspec

from metrics.costmodel import ModelShape, step_cost, step_work
from metrics.records import StepRecord
from metrics.steptime import StepTimeModel, features


class Appraiser:
    """Completes the records of the steps of one model, in their order. The core leaves out what its time is too dear
    for: FLOPs, bytes and the predicted time."""

    def __init__(self, shape: ModelShape):
        self.shape = shape
        self.step_time = StepTimeModel()

    def completed(self, record: StepRecord) -> StepRecord:
        work = step_work(self.shape, record.new_tokens, record.past_tokens, record.logit_rows)
        cost = step_cost(self.shape, work)
        found = features(work, record.padding_tokens, eager=record.graph == "eager")
        return msgspec.structs.replace(
            record,
            flops=cost.flops,
            flops_attention=cost.attention,
            flops_mlp=cost.mlp,
            flops_head=cost.head,
            bytes=cost.moved_bytes,
            predicted_ns=self.step_time.observe(found, record.device_ns),
        )
