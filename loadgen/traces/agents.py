"""Sessions of coding agents, one a file: `traces/*.json` of callanjfox/kv-cache-tester (Apache-2.0), which AgentX and
AIPerf replay too.

A request has hashes of its prompt's blocks, and the think time before it. A sub-agent stands between two requests of
its parent, which waits for it. Its `t` is the moment of its end, by its duration: its first request follows the
parent's answer. All of this is read, whatever the depth; the text is not in these files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.seeds import stable_seed
from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, files_of

Tokens = Annotated[int, Meta(ge=0, le=10_000_000)]
Seconds = Annotated[float, Meta(ge=0)]
SUB_AGENT = "subagent"
EMPTY = "requests without a prompt"


class Request(Struct):
    """One request, or one sub-agent with its own."""

    t: Seconds
    type: str
    prompt_tokens: Tokens = msgspec.field(name="in", default=0)
    output_tokens: Tokens = msgspec.field(name="out", default=0)
    hash_ids: list[Annotated[int, Meta(ge=0, lt=2**62)]] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    duration_ms: Seconds | None = None
    agent_id: str = ""
    requests: list["Request"] = []


class AgentTrace(Struct):
    id: str
    block_size: Annotated[int, Meta(ge=1, le=65_536)]
    requests: list[Request]
    hash_id_scope: str = "local"


def _recognises(head: Head) -> bool:
    return {"block_size", "requests"} <= (head.first_object or {}).keys()


def _rows(path: Path, _window: Window, tally: Tally) -> Iterator[TraceRow]:
    for file in files_of(path):
        try:
            trace = msgspec.json.decode(file.read_bytes(), type=AgentTrace)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ScenarioError(f"{file.name} is not a session with block_size and requests: {error}") from None
        yield from _Session(trace, file, tally, file.stem if path.is_dir() else trace.id).rows()


class _Session:
    """Flattens one session. `_places` grows with its rows."""

    def __init__(self, trace: AgentTrace, file: Path, tally: Tally, name: str):
        self._trace, self._file, self._tally, self._name = trace, file, tally, name
        self._num_rows = 0
        # Ids of one file say nothing of those of another, unless their scope is global.
        self._base = 0 if trace.hash_id_scope == "global" else stable_seed("agent trace", name) >> 1
        self._known: dict[int, int] = {}  # one object for each id: a long session repeats it a thousand times

    def rows(self) -> Iterator[TraceRow]:
        yield from self._agent(self._trace.requests, "", 0.0, (), 0.0)

    def _agent(
        self, requests: list[Request], agent: str, begin_s: float, after: tuple[int, ...], pause_s: float
    ) -> Iterator[TraceRow]:
        """The rows of one agent that begins `pause_s` after the end of `after`, and of its sub-agents. Returns the
        places of the last ones."""
        own = after  # what the next request waits for
        forked_from, end_s, joins_s = after, begin_s, None  # of sub-agents: whom they follow, and when the last ended
        for number, request in enumerate(requests):
            at_s = begin_s + request.t
            if request.type == SUB_AGENT:
                if not request.requests:
                    continue
                start_s = max(0.0, at_s - (request.duration_ms or 0.0) / 1e3)
                waits_s = max(0.0, start_s - end_s) if forked_from else start_s
                name = f"{agent}.{request.agent_id or number}".removeprefix(".")
                last = yield from self._agent(request.requests, name, start_s, forked_from, waits_s)
                own = last if joins_s is None else (*own, *last)
                joins_s = max(at_s, joins_s or 0.0)
                continue
            if not request.prompt_tokens:
                self._tally[EMPTY] += 1
                continue
            first = number == 0 and not joins_s
            if first:
                wait_s = pause_s
            elif joins_s is not None:
                wait_s = max(0.0, at_s - joins_s)
            else:
                wait_s = request.think_time if request.think_time is not None else max(0.0, at_s - end_s)
            yield self._row(request, at_s, own, wait_s, agent)
            own = forked_from = (self._num_rows - 1,)
            end_s, joins_s = at_s + (request.api_time or 0.0), None
        return own

    def _row(self, request: Request, at_s: float, after: tuple[int, ...], pause_s: float, agent: str) -> TraceRow:
        size, ids = self._trace.block_size, request.hash_ids
        if ids and not request.prompt_tokens // size <= len(ids) <= -(-request.prompt_tokens // size):
            raise ScenarioError(
                f"{self._file.name}: the request at {request.t:g} s has {len(ids)} hash_ids, but its prompt of "
                f"{request.prompt_tokens} tokens is {-(-request.prompt_tokens // size)} blocks of {size}"
            )
        known = self._known
        for each in ids:
            if each not in known:
                known[each] = each ^ self._base
        place, self._num_rows = self._num_rows, self._num_rows + 1
        return TraceRow(
            at_s, request.prompt_tokens, max(1, request.output_tokens), tuple([known[each] for each in ids]), size,
            session_id=self._name, place=place, after=after, pause_s=pause_s, agent=agent,
        )  # fmt: skip


def session_facts(rows: list[TraceRow]) -> dict[str, Any]:
    """Of the sessions of a trace: their number, agents beside the first, and joins of several answers."""
    return {
        "sessions": len({row.session_id for row in rows}),
        "sub_agents": len({(row.session_id, row.agent) for row in rows if row.agent}),
        "joins": sum(len(row.after or ()) > 1 for row in rows),
    }


KV_CACHE_TESTER = TraceForm(
    "agents", "JSON with id, block_size and requests of t, in, out, hash_ids, think_time; sub-agents within (a session "
    "of kv-cache-tester), or a folder of such files", _recognises, _rows, 64,
)  # fmt: skip
