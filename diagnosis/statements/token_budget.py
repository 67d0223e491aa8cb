"""What a step may hold, and the fixed cost of each."""

from sojourn.diagnosis.evidence import Records

PROMPT_WORK = ("compute.prefill", "request.interference")
SMALLEST_BUDGET = 32  # below it a step's fixed cost outweighs the tokens it carries on any device
LARGEST_BUDGET = 2048  # a candidate: beyond it a step of a mixed batch holds whole prompts, and decodes wait for it


def fixed_share(facts: Records, tokens: float) -> float:
    """The part of a step of so many tokens that it would cost without any; 0 where no step model is known."""
    model = facts.steps.model if facts.steps is not None else None
    if model is None:
        return 0.0
    return model.step_ns / max(model.predict(tokens, 0.0), 1.0)


def tokens_within(facts: Records, step_ms: float) -> int:
    """Prompt tokens beside the decodes of a step that takes so long, at least SMALLEST_BUDGET. Takes a step model."""
    steps = facts.steps
    context = steps.mean_batch * (facts.work.context_tokens if facts.work else 0)
    room = (step_ms * 1e6 - steps.model.predict(0, context)) / max(steps.model.token_ns, 1)
    return max(SMALLEST_BUDGET, int(room) // SMALLEST_BUDGET * SMALLEST_BUDGET)


def larger_budget(value: int, most: int) -> list[int]:
    """Twice, four times … the value, up to the most; the most itself at last."""
    found, next_ = [], 2 * value
    while next_ < most:
        found.append(next_)
        next_ *= 2
    return [*found[:5], most]
