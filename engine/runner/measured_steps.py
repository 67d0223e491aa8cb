"""Steps that are computed and timed before anything is served, for a first idea of this device's speed."""

from sojourn.engine.request.plan import Runner, ScheduledTokens, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.compute.cost_model import ModelShape, StepWork, step_work

DECODES = (1, 8, 32)  # sequences
CONTEXTS = (16, 256)  # tokens of theirs
CHUNKS = (2, 16, 64, 128, 256, 512, 1024, 2048)  # tokens of one prompt; those of KNOTS and between them
LONGEST_NS = 250_000_000  # after a step of that length no longer one is measured
ROUNDS = 2  # after one that is not counted: memory is faulted in, kernels are compiled


def measured_steps(
    runner: Runner, shape: ModelShape, *, most_tokens: int, max_num_seqs: int, max_model_len: int, num_slots: int,
    block_size: int,
) -> list[tuple[StepWork, bool, int]]:  # fmt: skip
    """Of each size: its work, whether it was launched kernel by kernel, and nanoseconds of the device, the least of
    ROUNDS. Writes to the KV cache, which must be unused."""
    found: list[tuple[StepWork, bool, int]] = []
    longest_context = min(max_model_len, num_slots)
    decodes = [
        (count, 1, min(context, longest_context) - 1)
        for context in CONTEXTS
        for count in DECODES
        if count <= max_num_seqs
    ]
    chunks = [(1, new, 0) for new in CHUNKS if new <= min(most_tokens, longest_context)]
    for sizes in (decodes, chunks):
        for count, new, past in sizes:
            outcomes = [_computed(runner, _plan(count, new, past, block_size)) for _ in range(1 + ROUNDS)]
            fastest = min(outcomes[1:], key=_duration)
            work = step_work(shape, [new] * count, [past] * count, fastest.logit_rows)
            found.append((work, fastest.graph == "eager", fastest.device_ns))
            if fastest.device_ns > LONGEST_NS:
                break
    return found


def _plan(count: int, new: int, past: int, block_size: int) -> StepPlan:
    """Sequences that all use the blocks of the first."""
    plan, params = StepPlan(0, 0), SamplingParams(max_tokens=1)
    length = past + new
    blocks = list(range(-(-length // block_size)))
    for index in range(count):
        request = Request(index, f"measured {index}", length, [0] * length, params, blocks=list(blocks))
        plan.add(ScheduledTokens(request, new, past, "prefill", samples=True))
    return plan


def _computed(runner: Runner, plan: StepPlan) -> StepOutcome:
    outcome = runner.collect(runner.launch(plan))
    for item in plan.scheduled:
        runner.forget(item.request.id)
    return outcome


def _duration(outcome: StepOutcome) -> int:
    return outcome.device_ns
