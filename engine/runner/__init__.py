"""StepPlan → tensors → model → sampled ids."""

from sojourn.engine.runner.batch import OVERFLOW
from sojourn.engine.runner.runner import ModelRunner

__all__ = ["OVERFLOW", "ModelRunner"]
