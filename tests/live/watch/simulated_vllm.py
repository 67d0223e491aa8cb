"""A vLLM of which everything is known, step by step: its page each second, as its own counters would fill it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.metrics.foreign import VllmPage

# As vLLM 0.32.0 has them (v1/metrics/buckets.py).
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


@dataclass(slots=True)
class _Request:
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    scheduled_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    kv: int = 0
    target: int = 0  # of `kv`, before it decodes
    done: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """What a step takes: seconds, of each prompt token, of each decoding request."""

    step_s: float = 0.010
    prompt_token_s: float = 0.0003
    decode_s: float = 0.0005


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals from `begin_s` to `end_s`, all of one length; `long` of them have prompts of `long_tokens`."""

    per_s: float
    begin_s: float = 0.0
    end_s: float = 1e9
    prompt_tokens: int = 100
    output_tokens: int = 40


@dataclass(slots=True)
class SimulatedVllm:
    """First come, first served; prompts in chunks beside the decodes, as engine V1 schedules."""

    loads: tuple[Load, ...]
    cap: int = 256
    budget: int = 2048
    kv_tokens: int = 65_536
    device: Device = Device()
    seed: int = 0
    hangs: tuple[float, float] = (1e9, 1e9)  # a step that begins in between ends at the second moment
    page: VllmPage | None = None

    def pages(self, seconds: int) -> Iterator[tuple[int, bytes]]:
        """(second, body of /metrics) of each second."""
        page = self.page = self.page or VllmPage(ttft_bounds=TTFT_BOUNDS, itl_bounds=ITL_BOUNDS)
        arrivals, waiting, running = deque(self._arrivals(seconds)), deque(), []
        now = shown_s = 0.0
        page.show(0, 0, 0.0, 0)
        while shown_s <= seconds:
            while arrivals and arrivals[0].arrived_s <= now:
                waiting.append(arrivals.popleft())
            took = self._step(page, now, waiting, running)
            if took is None:
                after = min(arrivals[0].arrived_s if arrivals else 1e9, shown_s + 1.0)
            else:
                after = now + took
                if self.hangs[0] <= now < self.hangs[1]:
                    after = self.hangs[1]
            while shown_s < after and shown_s <= seconds:
                yield int(shown_s), page.render()
                shown_s += 1.0
            if took is not None:
                self._end_step(page, after, running)
            now = after
            page.show(len(running), len(waiting), self._used(running) / self.kv_tokens, 0)

    def _arrivals(self, seconds: float) -> list[_Request]:
        random, found = Random(self.seed), []
        for load in self.loads:
            at = load.begin_s
            while (at := at + random.expovariate(load.per_s)) < min(load.end_s, seconds):
                found.append(_Request(at, load.prompt_tokens, load.output_tokens))
        return sorted(found, key=lambda each: each.arrived_s)

    @staticmethod
    def _used(running: list[_Request]) -> int:
        return sum(each.kv for each in running)

    def _step(self, page: VllmPage, now: float, waiting: deque[_Request], running: list[_Request]) -> float | None:
        """Seconds of the step that begins now; None where there is nothing to do."""
        budget = self.budget
        prompts = decodes = 0
        while self._used(running) + len(running) > self.kv_tokens:  # the last one gives its blocks back
            last = running.pop()
            last.kv, last.target = 0, last.prompt_tokens + last.done
            waiting.appendleft(last)
            page.of[0]["preempted"].inc()
        for each in running:
            if each.kv >= each.target:
                decodes, budget = decodes + 1, budget - 1
                each.kv += 1
        for each in running:
            chunk = max(0, min(budget, each.target - each.kv))
            each.kv, prompts, budget = each.kv + chunk, prompts + chunk, budget - chunk
        while waiting and len(running) < self.cap and budget > 0:
            first = waiting[0]
            first.target = first.target or first.prompt_tokens
            if self._used(running) + first.target > self.kv_tokens:
                break
            first.scheduled_s = now if first.scheduled_s < 0 else first.scheduled_s
            first.kv = min(budget, first.target)
            prompts, budget = prompts + first.kv, budget - first.kv
            running.append(waiting.popleft())
        if not running:
            return None
        device = self.device
        return device.step_s + prompts * device.prompt_token_s + decodes * device.decode_s

    def _end_step(self, page: VllmPage, now: float, running: list[_Request]) -> None:
        own = page.of[0]
        for each in list(running):
            if each.kv < each.target:
                continue
            each.done += 1
            if each.done == 1:
                each.first_s = now
                own["prompt"].inc(each.prompt_tokens)
                own["queries"].inc(each.prompt_tokens)
                own["ttft"].observe(now - each.arrived_s)
            else:
                own["itl"].observe(now - each.last_s)
            own["generated"].inc(1)
            each.last_s = now
            if each.done == each.output_tokens:
                running.remove(each)
                self._finish(page, each)

    @staticmethod
    def _finish(page: VllmPage, each: _Request) -> None:
        own, gaps = page.of[0], each.output_tokens - 1
        own["tpot"].observe((each.last_s - each.first_s) / gaps if gaps else 0)
        own["queue"].observe(each.scheduled_s - each.arrived_s)
        own["prefill"].observe(each.first_s - each.scheduled_s)
        own["decode"].observe(each.last_s - each.first_s)
        own["e2e"].observe(each.last_s - each.arrived_s)
        own["prompts"].observe(each.prompt_tokens)
        own["outputs"].observe(each.output_tokens)
        page.success[0]["length"].inc()
