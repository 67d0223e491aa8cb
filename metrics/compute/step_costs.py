"""What steps cost and what they should have cost, worked out where it delays nothing: where a batch of them arrives."""

import numpy as np

from sojourn.metrics.compute.cost_model import ModelShape, StepWork, step_cost, steps_work
from sojourn.metrics.compute.step_time import StepTimeModel, features
from sojourn.metrics.steps import UNKNOWN, Steps


class StepCosts:
    """Sets what steps of one model cost, batch by batch, in their order: FLOPs, bytes, expected time."""

    def __init__(self, shape: ModelShape):
        self.shape = shape
        self.step_time = StepTimeModel()

    def complete(self, steps: Steps) -> Steps:
        """Sets the costs in the records; returns the same steps."""
        work = batch_work(self.shape, steps)
        cost = step_cost(self.shape, work)
        copies_ns = transfer_ns(steps)
        predicted = self.step_time.observe_all(step_features(work, steps), steps["device_ns"] - copies_ns)
        predicted += copies_ns  # none of them is unexpected: they are measured by themselves
        steps.fill_costs(
            flops=cost.flops + steps["flops_adapters"],  # the core knows each token's adapter
            flops_attention=cost.attention,
            flops_mlp=cost.mlp,
            flops_head=cost.head,
            bytes=cost.moved_bytes + steps["adapter_bytes"],
            predicted_ns=np.nan_to_num(predicted, nan=UNKNOWN).astype(np.int64),
        )
        return steps


def step_features(work: StepWork, steps: Steps) -> np.ndarray:
    """[steps, NUM_FEATURES] of step_time.features, of recorded steps with such work."""
    return features(
        work, steps["padding_tokens"], eager=steps.is_eager.astype(float), adapter_flops=steps["flops_adapters"]
    )


def transfer_ns(steps: Steps) -> np.ndarray:
    """[steps] of the device's time, what copies of KV tiers took."""
    return np.maximum(steps["load_ns"], 0) + np.maximum(steps["store_ns"], 0)


def batch_work(shape: ModelShape, steps: Steps) -> StepWork:
    """The work of recorded steps: each field is an array [steps]."""
    return steps_work(shape, steps.new_tokens, steps.past_tokens, steps.sequences, steps["logit_rows"])
