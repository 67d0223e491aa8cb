"""A vLLM of which everything is known, step by step: its page each second, as its own counters would fill it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from prometheus_client import Gauge

from tests.metrics.foreign import VllmPage

# As vLLM 0.32.0 has them (v1/metrics/buckets.py).
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TIMEOUT_S = 5  # of a watch, for a page
ITL_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


@dataclass(slots=True, eq=False)
class _Request:
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    queued_s: float = -1.0  # the core takes it in between two steps, and its queue begins there
    scheduled_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    kv: int = 0
    target: int = 0  # of `kv`, before it decodes
    done: int = 0
    cached: int = 0
    gives_up_s: float = 1e9
    core_s: float = 0.0  # when the front gives it to the core
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """What a step takes: seconds, of each prompt token, of each decoding request."""

    step_s: float = 0.010
    prompt_token_s: float = 0.0003
    decode_s: float = 0.0005


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals from `begin_s` to `end_s`, all of one length. With `burst` so many come at once, in a steady
    rhythm."""

    per_s: float
    begin_s: float = 0.0
    end_s: float = 1e9
    prompt_tokens: int = 100
    output_tokens: int = 40
    burst: int = 0
    cached: float = 0.0  # of the prompt, what the prefix cache has
    engine: int = -1  # that it goes to; by default each has such a load
    patience_s: float = 1e9  # after which a client disconnects
    adapters: int = 0  # that its requests name in turn


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
    stands: tuple[float, float, float] = (1e9, 0.0, 1.0)  # from a second on it stands for so long, once in each so long
    slow: tuple[float, float, float] = (1e9, 1e9, 1.0)  # steps that begin in between take so many times as long
    front_stops: tuple[float, float] = (1e9, 1e9)  # no page comes in between
    restart_s: float = 1e9  # the process ends, with its requests, and the next page is of a new one
    drafts: int = 0  # that each decode of a step verifies
    accepted: float = 0.0  # of them; the first rejected one ends a round
    external: bool = False  # a cache beside the server's own, which is asked for what that misses, and has nothing
    lookup_s: float = 0.0  # that such a question keeps the step
    front_s: float = 0.0  # of its one process, that each request takes before it reaches the core
    slots: int = 0  # of adapters, that may run at once
    engines: int = 1  # each has this load, cap and pool
    hung_engines: int = 1  # of them
    page: VllmPage | None = None
    idle_fds: int = 39  # open files of the front without a client
    _open: dict[int, int] = field(default_factory=dict)  # engine → connections of its clients
    _fds: Gauge | None = None
    _in_front: list[tuple[float, float]] = field(default_factory=list)
    _chance: Random = field(default_factory=lambda: Random(1))

    def pages(self, seconds: int) -> Iterator[tuple[int, bytes]]:
        """(second, body of /metrics) of each second; b"" where no page came within a timeout of five seconds."""
        self.page = self.page or self._new_page()
        for second, *_ in zip(*(self._engine(seconds, engine) for engine in range(self.engines)), strict=True):
            self.show_files()
            stopped_s = second - self.front_stops[0]
            if stopped_s < 0 or second >= self.front_stops[1]:
                yield second, self.page.render()
            elif stopped_s and stopped_s % TIMEOUT_S == 0:
                yield second, b""

    def show_files(self) -> None:
        self._fds.set(self.idle_fds + sum(self._open.values()))

    def _new_page(self) -> VllmPage:
        page = VllmPage(self.engines, ttft_bounds=TTFT_BOUNDS, itl_bounds=ITL_BOUNDS, drafts=self.drafts > 0,
                        cpu=self.front_s > 0, adapters=self.slots > 0)  # fmt: skip
        self._fds = Gauge("process_open_fds", "as prometheus_client's collector of processes", registry=page.registry)
        return page

    def _engine(self, seconds: int, engine: int) -> Iterator[int]:
        """Each second, once the page shows what one engine did until then."""
        arrivals, waiting, running = deque(self._arrivals(seconds, engine)), deque(), []
        now = shown_s = 0.0
        hangs = self.hangs if engine < self.hung_engines else (1e9, 1e9)
        self.page.show(0, 0, 0.0, engine)
        restart_s = self.restart_s
        while shown_s <= seconds:
            if now >= restart_s:
                self.page, waiting, running, restart_s = self._new_page(), deque(), [], 1e9
            page, goes_on_s = self.page, self._goes_on_s(now)
            while shown_s < goes_on_s and shown_s <= seconds:
                yield int(shown_s)
                shown_s += 1.0
            now = goes_on_s
            while arrivals and arrivals[0].core_s <= now:
                waiting.append(arrivals.popleft())
                waiting[-1].queued_s = now
            self._disconnect(page, now, waiting, running, engine)
            took = self._step(page, now, waiting, running, engine)
            if took is None:
                after = min(arrivals[0].core_s if arrivals else 1e9, shown_s + 1.0)
            else:
                after = now + took
                if self.slow[0] <= now < self.slow[1]:
                    after = now + self.slow[2] * took
                if hangs[0] <= now < hangs[1]:
                    after = hangs[1]
            while shown_s < after and shown_s <= seconds:
                outside = sum(each.arrived_s <= shown_s for each in arrivals)
                self._open[engine] = outside + len(waiting) + len(running)
                yield int(shown_s)
                shown_s += 1.0
            if took is not None:
                self._end_step(page, after, running, engine)
            now = after
            page.show(len(running), len(waiting), self._used(running) / self.kv_tokens, engine)
            self._show_beside(page, now, running, waiting)

    def _goes_on_s(self, now: float) -> float:
        begin_s, length_s, every_s = self.stands
        since_s = (now - begin_s) % every_s
        return now + length_s - since_s if now >= begin_s and since_s < length_s else now

    def _arrivals(self, seconds: float, engine: int) -> list[_Request]:
        random, found = Random(self.seed * 100 + engine), []
        for load in (load for load in self.loads if load.engine in (-1, engine)):
            at = load.begin_s
            while (at := at + (load.burst / load.per_s if load.burst else random.expovariate(load.per_s))) < min(
                load.end_s, seconds
            ):
                found += [
                    _Request(at, load.prompt_tokens, load.output_tokens, cached=int(load.cached * load.prompt_tokens),
                             gives_up_s=at + load.patience_s,
                             adapter=f"a{random.randrange(load.adapters)}" if load.adapters else "")
                    for _ in range(load.burst or 1)
                ]  # fmt: skip
        found.sort(key=lambda each: each.arrived_s)
        free_s = 0.0
        for each in found:
            each.core_s = free_s = max(free_s, each.arrived_s) + self.front_s
        self._in_front = [(each.core_s - self.front_s, each.core_s) for each in found] if self.front_s else []
        return found

    def _show_beside(self, page: VllmPage, now: float, running: list[_Request], waiting: deque[_Request]) -> None:
        """The front's CPU time, and the adapters of requests."""
        if page.cpu is not None:
            page.cpu.set(sum(min(end, now) - begin for begin, end in self._in_front if begin < now))
        if page.adapters is not None:
            lists = (",".join(sorted({each.adapter for each in line if each.adapter})) for line in (waiting, running))
            page.adapters.labels(str(self.slots), *lists).set(1e9 + now)

    def _disconnect(self, page: VllmPage, now: float, waiting: deque[_Request], running: list[_Request],
                    engine: int) -> None:  # fmt: skip
        for line in (waiting, running):
            for each in [each for each in line if each.gives_up_s <= now]:
                line.remove(each)
                page.success[engine]["abort"].inc()
                page.of[engine]["e2e"].observe(now - each.arrived_s)

    @staticmethod
    def _used(running: list[_Request]) -> int:
        return sum(each.kv for each in running)

    def _step(self, page: VllmPage, now: float, waiting: deque[_Request], running: list[_Request],
              engine: int) -> float | None:  # fmt: skip
        """Seconds of the step that begins now; None where there is nothing to do."""
        budget = self.budget
        prompts = decodes = 0
        while self._used(running) + len(running) > self.kv_tokens:  # the last one gives its blocks back
            last = running.pop()
            last.kv, last.target = 0, last.prompt_tokens + last.done
            waiting.appendleft(last)
            page.of[engine]["preempted"].inc()
        for each in running:
            if each.kv >= each.target:
                decodes, budget = decodes + 1, budget - 1
                each.kv += 1
        for each in running:
            chunk = max(0, min(budget, each.target - each.kv))
            each.kv, prompts, budget = each.kv + chunk, prompts + chunk, budget - chunk
        asked = 0
        while len(running) < self.cap and budget > 0:
            first = self._next(waiting, running)
            if first is None:
                break
            first.target = first.target or first.prompt_tokens
            if self._used(running) + first.target > self.kv_tokens:
                break
            first.scheduled_s = now if first.scheduled_s < 0 else first.scheduled_s
            first.kv = min(first.cached + budget, first.target)
            prompts, budget = prompts + first.kv - first.cached, budget - first.kv + first.cached
            if self.external:
                page.of[engine]["external_queries"].inc(first.target - first.cached)
                asked += 1
            waiting.remove(first)
            running.append(first)
        if not running:
            return None
        device = self.device
        rows = decodes * (1 + self.drafts)
        return device.step_s + prompts * device.prompt_token_s + rows * device.decode_s + asked * self.lookup_s

    def _next(self, waiting: deque[_Request], running: list[_Request]) -> _Request | None:
        """The first that needs no further slot of an adapter, where all are taken."""
        used = {each.adapter for each in running if each.adapter}
        for each in waiting:
            if not each.adapter or not self.slots or each.adapter in used or len(used) < self.slots:
                return each
        return None

    def _end_step(self, page: VllmPage, now: float, running: list[_Request], engine: int) -> None:
        own = page.of[engine]
        for each in list(running):
            if each.kv < each.target:
                continue
            gained = self._verify(own) if self.drafts and each.done else 1
            gained = min(gained, each.output_tokens - each.done)
            each.kv += gained - 1
            each.done += gained
            if each.first_s < 0:
                each.first_s = now
                own["prompt"].inc(each.prompt_tokens)
                own["queries"].inc(each.prompt_tokens)
                own["hits"].inc(each.cached)
                own["ttft"].observe(now - each.arrived_s)
            else:
                own["itl"].observe(now - each.last_s)
            own["generated"].inc(gained)
            each.last_s = now
            if each.done >= each.output_tokens:
                running.remove(each)
                self._finish(page, each, engine)

    def _verify(self, own: dict) -> int:
        """The tokens that one request gets of a step with drafts."""
        accepted = 0
        while accepted < self.drafts and self._chance.random() < self.accepted:
            accepted += 1
        for name, number in (("rounds", 1), ("drafted", self.drafts), ("accepted", accepted)):
            own[name].inc(number)
        return 1 + accepted

    @staticmethod
    def _finish(page: VllmPage, each: _Request, engine: int) -> None:
        own, gaps = page.of[engine], each.output_tokens - 1
        own["tpot"].observe((each.last_s - each.first_s) / gaps if gaps else 0)
        own["queue"].observe(each.scheduled_s - each.queued_s)
        own["prefill"].observe(each.first_s - each.scheduled_s)
        own["decode"].observe(each.last_s - each.first_s)
        own["e2e"].observe(each.last_s - each.arrived_s)
        own["prompts"].observe(each.prompt_tokens)
        own["outputs"].observe(each.output_tokens)
        page.success[engine]["length"].inc()
