"""The time of a turn in a replay: what the fitted model expects of its plan, times what the run had at that moment."""

from collections.abc import Callable, Mapping, Sequence

from sojourn.engine.request.plan import StepPlan
from sojourn.replay.decode_runs import DecodeRun
from sojourn.replay.device.estimate import DeviceStep, device_step
from sojourn.replay.noise import Noise
from sojourn.replay.simulated_runner import TurnTimes
from sojourn.replay.step_fit import StepTimes


class FittedTurns:
    """Owns a replay's factors and what it counts of its steps. `removed` are shares (0 to 1) of accounts; the other
    factors multiply. `carried`: by how much another device is slower for a step."""

    def __init__(
        self, times: StepTimes, noise: Noise | None, *, device_speed: float = 1.0, slowness: float = 1.0,
        slowness_beyond: float = 1.0, removed: Mapping[str, float] | None = None,
        carried: Callable[[DeviceStep], float] | None = None,
    ) -> None:  # fmt: skip
        removed = removed or {}
        self._times, self._noise, self._carried = times, noise, carried
        self._device = slowness / device_speed
        self._beyond = slowness_beyond / slowness  # of steps larger or smaller than those of the run
        self._host = slowness * (1 - removed.get("compute.host", 0.0))
        self._kept_prefill = 1 - removed.get("compute.prefill", 0.0)
        self._kept_decode = 1 - removed.get("compute.decode", 0.0)
        self._removed_sampling = removed.get("token.sample", 0.0)
        self._sampling = times.sampling.tolist()
        self._is_split = self._kept_prefill != 1 or self._kept_decode != 1
        self._stages = [tuple(coefficients.tolist()) for coefficients in times.host]
        self.extrapolated_ns = self.device_ns = 0.0  # device time of such steps, and of all
        self.guessed_ns = 0.0  # device time of steps of which no other run tells either

    @property
    def idle_receive_ns(self) -> float:
        return self._stages[0][0] * self._host

    def times(self, plan: StepPlan, begin_ns: float) -> TurnTimes:
        tokens = decodes = decode_pairs = chunks = chunk_pairs = rows = verifies = verified_rows = 0
        for _, new, past, _, samples, drafts in plan.scheduled:
            tokens += new
            if drafts:
                verifies += 1
                verified_rows += new
            else:
                rows += samples
            if new == 1:
                decodes += 1
                decode_pairs += past + 1
            else:
                chunks += 1
                chunk_pairs += new * past + new * (new + 1) // 2
        sequences, ended = len(plan.scheduled), min(max(rows - decodes, 0), chunks - verifies)
        rows += verified_rows
        ratio = 1.0 if self._carried is None else self._carried(device_step(plan))
        return self._times_of(
            tokens, decodes, decode_pairs, chunks, chunk_pairs, rows, ended, sequences, begin_ns, ratio
        )

    def _times_of(
        self, tokens: int, decodes: int, decode_pairs: int, chunks: int, chunk_pairs: int, rows: int, ended: int,
        sequences: int, begin_ns: float, ratio: float = 1.0,
    ) -> TurnTimes:  # fmt: skip
        """`ended`: prompts that end in the step. `ratio`: of another device's time for it to that of the run's."""
        model = self._times
        expected = model.device_ns(tokens, decodes, decode_pairs, chunks, chunk_pairs, rows)
        device_ratio, host_ratio, stall_ns = (
            (1.0, 1.0, 0.0) if self._noise is None else self._noise.at(begin_ns, expected)
        )
        if self._is_split:
            decode_part = model.device_ns(decodes, decodes, decode_pairs, 0, 0, decodes) if decodes else 0.0
            expected_kept = self._kept_prefill * (expected - decode_part) + self._kept_decode * decode_part
        else:
            expected_kept = expected
        if self._removed_sampling:
            sampling = self._sampling[0] + self._sampling[1] * rows
            expected_kept -= self._removed_sampling * min(sampling, expected_kept)
        factor = self._host * host_ratio
        receive, before, after, publish = (
            factor * (c[0] + c[1] * sequences + c[2] * ended + c[3] * tokens) for c in self._stages
        )
        device_ns = expected_kept * ratio * device_ratio * self._device + stall_ns
        if tokens > model.largest_tokens or decodes > model.most_decodes or tokens < model.fewest_tokens:
            device_ns *= self._beyond
            self.extrapolated_ns += device_ns
            if tokens > model.told_tokens or decodes > model.told_decodes or tokens < model.told_fewest:
                self.guessed_ns += device_ns
        self.device_ns += device_ns
        return TurnTimes(before, device_ns, after, publish, receive)

    def decode_run(self, past_tokens: Sequence[int], count: int) -> tuple[TurnTimes, float]:
        """The first of `count` turns that decode these sequences, and by how many ns the device's time grows in each.

        Only without noise, or with the same at all moments. Counts nothing.
        """
        decodes = len(past_tokens)
        counted = self.device_ns, self.extrapolated_ns, self.guessed_ns
        pairs = sum(past_tokens) + decodes
        first, last = (
            self._times_of(
                decodes, decodes, seen, 0, 0, decodes, 0, decodes, 0.0,
                1.0 if self._carried is None else self._carried(DeviceStep((), decodes, seen - decodes)),
            ) for seen in (pairs, pairs + decodes * (count - 1))
        )  # fmt: skip
        self.device_ns, self.extrapolated_ns, self.guessed_ns = counted
        return first, (last.device - first.device) / max(1, count - 1)

    def took(self, run: DecodeRun, turns: int) -> None:
        self.device_ns += turns * run.first.device + run.growth_ns * (turns * (turns - 1) // 2)
