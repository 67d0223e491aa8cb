"""How the time of a step is divided among its requests: by FLOPs, and what others' prompts took is interference."""

from collections.abc import Sequence
from typing import NamedTuple

from sojourn.metrics.compute.cost_model import ModelShape, decode_flops, request_flops
from sojourn.metrics.records import PROMPT_KINDS


class Work(NamedTuple):
    """The part of one request in a step."""

    key: int  # its owner's name for it
    kind: str  # of metrics.records.KINDS
    new: int  # tokens that are computed
    past: int  # tokens before them
    rows: int  # rows with logits


class StepShares(NamedTuple):
    """FLOPs; without a model shape tokens."""

    prompts: dict[int, int]  # of each prompt, by its key
    of_prompts: int  # of all of them
    total: int  # of the whole step, at least 1

    def interference_ns(self, device_ns: int, key: int | None = None) -> int:
        """Of the device's time what the prompts of others took; without a key, for a request that decodes."""
        own = 0 if key is None else self.prompts.get(key, 0)
        return device_ns * (self.of_prompts - own) // self.total


NO_PROMPTS = StepShares({}, 0, 1)


def step_shares(shape: ModelShape | None, work: Sequence[Work]) -> StepShares:
    """The shares of the requests of a step. A prompt that is alone in it has all of it."""
    if len(work) == 1 and work[0].kind in PROMPT_KINDS:
        return StepShares({work[0].key: 1}, 1, 1)
    if shape is None:
        prompts = {key: new for key, kind, new, _, _ in work if kind in PROMPT_KINDS}
        return StepShares(prompts, sum(prompts.values()), max(sum(each.new for each in work), 1))
    decodes = [past for _, kind, new, past, rows in work if kind == "decode" and new == 1 and rows]
    prompts, total = {}, decode_flops(shape, decodes)
    if len(decodes) < len(work):
        for key, kind, new, past, rows in work:
            if kind != "decode" or new != 1 or not rows:
                flops = request_flops(shape, new, past, rows)
                total += flops
                if kind in PROMPT_KINDS:
                    prompts[key] = flops
    return StepShares(prompts, sum(prompts.values()), max(total, 1))
