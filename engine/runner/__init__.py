"""StepPlan → tensors → model → sampled ids."""

from engine.runner.finishes import OVERFLOW
from engine.runner.runner import ModelRunner

__all__ = ["OVERFLOW", "ModelRunner"]
