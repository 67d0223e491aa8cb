"""When a core counts as hung: judged by how long it gave no sign of life. Pure: no process, no clock."""

from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.messages import Ready
from sojourn.metrics.compute.cost_model import request_flops

TICK_SECONDS = 0.25  # between two looks of the front
# The speed of a device that must not count as hung in its longest step: a tenth of what slow ones reach.
SLOWEST_CPU_THREAD_FLOPS = 1e10
SLOWEST_CUDA_FLOPS = 1e13
PROFILING_SECONDS = 120  # the loop stands still while torch's profiler starts, and while it stops


class Heartbeat:
    """The silence of one core, from the moment when it was ready."""

    def __init__(self, config: EngineConfig, ready: Ready):
        self.silence_seconds = 0.0
        self.longest_step_seconds = longest_step_seconds(config, ready)
        self._noticed_after = config.core_silence_seconds + self.longest_step_seconds
        self._hung_after = config.core_hung_seconds + self.longest_step_seconds
        self._is_profiling = False

    def sign_of_life(self) -> None:
        self.silence_seconds = 0.0

    def let_pass(self, seconds: float, *, is_profiling: bool) -> None:
        """Some time went by without a message. Time in which the front itself stood still proves nothing: the core's
        messages lie unread in the socket."""
        self.silence_seconds += min(seconds, 2 * TICK_SECONDS)
        self._is_profiling = is_profiling

    @property
    def is_silent(self) -> bool:
        """Longer than the longest step can explain: no new request should go there."""
        return self.silence_seconds > self._noticed_after + self._allowance

    @property
    def is_hung(self) -> bool:
        """So long that it is killed."""
        return self.silence_seconds > self.hung_after_seconds

    @property
    def hung_after_seconds(self) -> float:
        """The longest silence that passes."""
        return self._hung_after + self._allowance

    @property
    def _allowance(self) -> float:
        return PROFILING_SECONDS if self._is_profiling else 0.0


def longest_step_seconds(config: EngineConfig, ready: Ready) -> float:
    """A bound of the longest step's duration: all its tokens at the end of a context of max_model_len, and logits for
    every sequence, on a very slow device of that kind."""
    most = largest_step_tokens(config, "cpu" if ready.device == "cpu" else "cuda")
    new = min(most, ready.max_model_len)
    flops = request_flops(ready.shape, new, ready.max_model_len - new, sampled=config.max_num_seqs * config.most_rows)
    flops += (most - new) * ready.shape.linear_flops_per_token
    speed = SLOWEST_CPU_THREAD_FLOPS * ready.threads if ready.device == "cpu" else SLOWEST_CUDA_FLOPS
    return flops / speed
