"""What one step of a model costs on a device: the question that a replay, a plan and a size estimate ask.

Three makers answer it: the fitted steps of a run, the roofline of the device catalogue, and tables of measured kernels.
"""

from typing import Literal, NamedTuple, Protocol

import msgspec

from sojourn.engine.request.plan import StepPlan
from sojourn.metrics.errors import ReplayError

Backend = Literal["sojourn", "vllm", "sglang", "trtllm"]
# How a server composes a step: prompts and decodes together; prompts before decodes; whole prompts beside decodes.
Composition = Literal["mixed", "prefill-first", "whole-prompts"]


class OutsideTables(ReplayError):
    """An estimate is asked for a step or a deployment of which its maker knows nothing; the sentence names what it
    knows."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a server: what it computes, and on what."""

    model: str  # the name of a bundled shape, or a folder with a config.json
    device: str  # of the device catalogue, such as h100_sxm; an estimate of a run has "recorded"
    backend: Backend = "vllm"
    tensor_parallel: int = 1  # devices of a replica
    expert_parallel: int = 1
    weight_format: str = "bf16"  # of the catalogue of formats, such as fp8
    kv_format: str = "bf16"

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel


class DeviceStep(NamedTuple):
    """The part of a plan that a device's time depends on. Counts are of tokens of one replica."""

    chunks: tuple[tuple[int, int], ...]  # (new tokens, past tokens) of each sequence with more than one new token
    decodes: int  # sequences with one new token
    decode_past_tokens: int  # summed over those

    @property
    def chunk_tokens(self) -> int:
        return sum([new for new, _ in self.chunks])

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def decode_pairs(self) -> int:
        """Of a query and a key that it sees, in one layer."""
        return self.decode_past_tokens + self.decodes

    @property
    def chunk_pairs(self) -> int:
        return sum([new * past + new * (new + 1) // 2 for new, past in self.chunks])


class KnownError(msgspec.Struct, frozen=True, kw_only=True):
    """How wrong a maker was for a cell of public measurements: measured time over estimated time, as ratios."""

    cell: str  # such as "Llama-3.1-70B, h100_sxm, vllm, fp8, 2 or 4 devices"
    measurements: int
    median: float  # relative, absolute value
    p90: float
    bias: float  # median of estimated / measured - 1
    low: float  # bounds of the 80 % interval of measured / estimated
    high: float
    has_degree: bool = True  # some of the measurements are of as many devices


class DeviceEstimate(Protocol):
    """Times of one deployment."""

    deployment: Deployment
    composition: Composition
    kv_tokens: int  # that the pool of a replica holds
    host_ns: float  # of a step, beside the device's time
    provenance: str  # where the times come from: maker, version, and a date where it has one
    error: KnownError | None  # of the nearest cell that was judged; None where nothing judges it

    def device_ns(self, step: DeviceStep) -> float:
        """Raises OutsideTables."""
        ...


def device_step(plan: StepPlan) -> DeviceStep:
    """What a plan of the scheduler asks of a device."""
    chunks, decodes, decode_past = [], 0, 0
    for _, new, past, *_ in plan.scheduled:
        if new == 1:
            decodes += 1
            decode_past += past
        else:
            chunks.append((new, past))
    return DeviceStep(tuple(chunks), decodes, decode_past)
