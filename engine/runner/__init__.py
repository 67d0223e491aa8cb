"""StepPlan → tensors → model → sampled ids."""
