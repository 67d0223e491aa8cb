"""How a server of each kind fills a step, and what its host takes beside the device."""

from typing import NamedTuple

from sojourn.replay.device.estimate import Backend, Composition


class Serving(NamedTuple):
    """A backend's defaults on a data centre's device."""

    title: str
    composition: Composition
    step_tokens: int  # of a step at most
    sequences: int  # at the same time at most
    memory_fraction: float  # of the device's memory, for weights, work space and KV together
    fraction_is_of_free: bool  # it counts what the weights leave
    host_ns: float  # of a step: its plan, its launch and its sampling, as far as the device waits for them


# host_ns: fitted by `python -m bench.silicon` on half of the public measurements of H100; docs/results/silicon.md.
SERVING: dict[Backend, Serving] = {
    "vllm": Serving("vLLM", "mixed", 8192, 1024, 0.92, False, 0.40e6),
    "sglang": Serving("SGLang", "prefill-first", 8192, 1024, 0.88, False, 1.45e6),
    "trtllm": Serving("TensorRT-LLM", "whole-prompts", 8192, 2048, 0.90, True, 0.30e6),
    "sojourn": Serving("Sojourn", "mixed", 8192, 256, 0.92, False, 0.0),
}
