"""A scenario and a seed give a schedule: when, what kind, how long. Pure, and fixed before anything is sent."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, repeat
from typing import Any

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.open_arrivals import MAX_REQUESTS
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.scenario.workload import RequestClass
from sojourn.loadgen.schedule.closed_loop import check_size, draw_pauses, enough
from sojourn.loadgen.schedule.content import ContentSource
from sojourn.loadgen.schedule.draws import NS_PER_S, draw_length
from sojourn.loadgen.schedule.recorded_sessions import RecordedSession, recorded_pause_ns
from sojourn.loadgen.schedule.request import SESSION_BEGIN, ScheduledRequest
from sojourn.loadgen.schedule.sessions import Sessions
from sojourn.loadgen.seeds import seeded_rng, stable_seed
from sojourn.loadgen.traces.row import TraceRow


def build_schedule(scenario: Scenario, seed: int, id_prefix: str) -> list[ScheduledRequest]:
    """All requests of a run in order of their due time, the prelude first. `id_prefix` tells runs apart."""
    builder = _RequestBuilder(scenario, seed, id_prefix)
    arrivals, rng, sessions = scenario.arrivals, arrivals_rng(seed), Sessions(seed, id_prefix)
    class_rng = seeded_rng(seed, "classes")
    loop = arrivals.closed_loop
    if loop is None:
        offsets_s, rows = arrivals.draw(rng)
        pauses_ns = repeat(0)
        _check_warmup(scenario, offsets_s[-1], offsets_s[0] + scenario.measure.warmup_s)
    else:
        check_size(scenario, loop)
        _check_warmup(scenario, loop.duration_s or math.inf, scenario.measure.warmup_s)
        offsets_s, rows, pauses_ns = repeat(0.0), repeat(None), draw_pauses(loop, rng)
    requests = [
        builder.request(step, klass, prelude=True)
        for step, klass in zip(range(scenario.measure.warmup_requests), cycle(scenario.workload.classes), strict=False)
    ]

    def chains() -> Iterator[list[ScheduledRequest]]:
        for offset_s, row, pause_ns in zip(offsets_s, rows, pauses_ns, strict=False):
            for klass in _classes(scenario, class_rng, builder.content.class_of(row)):
                recorded = builder.content.session_of(klass)
                first = builder.request(len(requests), klass, offset_s, recorded[0] if recorded else row)
                if loop is not None:
                    first = replace(first, due_offset_ns=None, pause_ns=pause_ns)
                if recorded:
                    yield builder.recorded_session(first, klass, recorded, sessions)
                else:
                    yield sessions.turns(first, klass)

    for chain in chains() if loop is None else enough(loop, arrivals.count, chains()):
        requests += chain
        if len(requests) > MAX_REQUESTS:
            raise ScenarioError(f"the load has more than {MAX_REQUESTS} requests, turns included; shorten it")
    return requests


def arrivals_rng(seed: int) -> np.random.Generator:
    return seeded_rng(seed, "arrivals")


def _check_warmup(scenario: Scenario, last_s: float, measured_from_s: float) -> None:
    if last_s < measured_from_s:
        raise ScenarioError(
            f"measure.warmup_s is {scenario.measure.warmup_s:g}, but the last arrival is due at "
            f"{last_s:.1f} s, so nothing would be measured; shorten the warm-up"
        )


def _classes(scenario: Scenario, rng: np.random.Generator, named: RequestClass | None) -> list[RequestClass]:
    """The classes that send at one arrival: the one that the trace's row names, if any."""
    if named is not None:
        return [named]
    classes = scenario.workload.classes
    if scenario.workload.each_arrival == "every_class":
        return classes
    weights = np.array([klass.weight for klass in classes])
    return [classes[rng.choice(len(classes), p=weights / weights.sum())]]


class _RequestBuilder:
    def __init__(self, scenario: Scenario, seed: int, id_prefix: str):
        self._seed, self._id_prefix = seed, id_prefix
        self._rng = seeded_rng(seed, "lengths")
        self.content = ContentSource(scenario, seed)

    def request(
        self, index: int, klass: RequestClass, offset_s: float = 0.0, row: TraceRow | None = None, prelude: bool = False
    ) -> ScheduledRequest:
        row = None if prelude else self.content.row_of(klass, row)
        prompt_tokens = draw_length(klass.prompt_tokens, row.prompt_tokens if row else None, self._rng)
        max_tokens = draw_length(klass.output_tokens, row.output_tokens if row else None, self._rng, "output_tokens")
        prefix = int(self._rng.integers(klass.num_shared_prefixes)) if klass.shared_prefix_tokens else -1
        request = ScheduledRequest(
            index=index, request_id=f"{self._id_prefix}-{index:06d}", due_offset_ns=round(offset_s * NS_PER_S),
            klass=klass.klass, tenant=klass.tenant, session_id="", turn=0,
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, shared_prefix=prefix,
            shared_prefix_tokens=klass.shared_prefix_tokens, temperature=klass.temperature, top_k=klass.top_k,
            top_p=klass.top_p, ignore_eos=klass.ignore_eos, seed=stable_seed(self._seed, index) >> 1,
            prelude=prelude, priority=klass.priority,
        )  # fmt: skip
        return self.content.fill(request, klass, row)

    def recorded_session(
        self, first: ScheduledRequest, klass: RequestClass, rows: RecordedSession, sessions: Sessions
    ) -> list[ScheduledRequest]:
        """All requests of a recorded session, each after those that it waited for. `first` is that of its first row."""
        name, number = sessions.next_name()
        index_of = {row.place: first.index + step for step, row in enumerate(rows)}
        turns: Counter[str] = Counter()
        chain = []
        for step, row in enumerate(rows):
            request = first if step == 0 else self.request(first.index + step, klass, row=row)
            own = {"session_id": f"{name}.{row.agent}" if row.agent else name, "turn": turns[row.agent]}
            if step:
                after = tuple(index_of[place] for place in row.after) or (SESSION_BEGIN,)
                own |= {"due_offset_ns": None, "after": after, "pause_ns": recorded_pause_ns(row, klass)}
            turns[row.agent] += 1
            salted = _salted(request, number) if klass.salt == "session" else {}
            chain.append(replace(request, **own, **salted, **sessions.patience(klass)))
        return chain


def _salted(request: ScheduledRequest, session: int) -> dict[str, Any]:
    """The content of a request that no other session has: other blocks, or another beginning of the text."""
    salt = stable_seed("salt", session) >> 1
    if request.block_ids:
        return {"block_ids": tuple([each ^ salt for each in request.block_ids])}
    content = json.loads(request.content)
    first = f"{salt:016x} "
    if isinstance(content, str):
        return {"content": json.dumps(first + content, ensure_ascii=False)}
    content[0] |= {"content": first + content[0]["content"]}
    return {"content": json.dumps(content, ensure_ascii=False)}
