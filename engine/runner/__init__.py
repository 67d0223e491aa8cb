"""StepPlan → tensors → model → sampled ids."""

from engine.runner.batch import OVERFLOW
from engine.runner.runner import ModelRunner

__all__ = ["OVERFLOW", "ModelRunner"]
