"""The tools that an agent calls, by the Model Context Protocol. They read one folder of runs, and the metrics of the
live servers that the operator named, and write nothing.

Every answer is a document of `scripting.documents`: it names its evidence, and says what the records cannot show. What
is wrong with a question comes back as a sentence (a tool error), never as a crash of the server.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from sojourn.live.watch.fetch import base_of
from sojourn.metrics.errors import InputError, RunDataError, SojournError
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL, parse_bounds
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.version import own_version
from sojourn.scripting.documents import RunList, plain

INSTRUCTIONS = (
    "Sojourn accounts for the time of every request of a language model server. Start with list_runs. diagnose says "
    "which lifecycle (token, compute, memory, request) is the bottleneck, with evidence for and against, and which "
    "measurement would prove it. Report its confidence, and report what it calls unknown as unknown. explain_request "
    "and ledger show where time went; replay predicts a change with an 80% interval; compare tests whether B is worse "
    "than A; kv_lens says what more KV memory would hit; query takes one SELECT; watch_server observes a live server "
    "for some seconds; triage reads a pasted log, page or summary. "
    "Times that end with _ns are nanoseconds, latencies that end with _ms milliseconds."
)
LONGEST_NAME = 500  # characters
LONGEST_PASTE = 5_000_000  # characters
MOST_FILES = 100_000  # of a run, that are looked at
MOST_REPLAYS = 50  # changes of one call: a replay of a long run takes a second

RunName = Annotated[str, Field(description="name of a run, as list_runs gives it", max_length=LONGEST_NAME)]
Tool = Callable[..., msgspec.Struct]


class Folder:
    """The folder of runs. No name, and no link in a run, leads out of it."""

    def __init__(self, path: Path):
        self._path = path.resolve()

    def run(self, name: str) -> RunDirectory:
        """Raises InputError for what is outside, and RunDataError for what is no run."""
        place = self._path / name
        try:
            found = place.resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a null byte, a circle of links
            raise InputError(f"{name!r} is no name of a run: {error}") from None
        if found == self._path or not found.is_relative_to(self._path):
            raise InputError(f"{name!r} is not a run in the folder of this server; list_runs names them")
        if not (found / "run.json").is_file():
            raise RunDataError(f"there is no run {name!r} here; list_runs names those there are")
        for number, file in enumerate(found.rglob("*")):
            if number >= MOST_FILES:
                raise RunDataError(f"{name} has more than {MOST_FILES:,} files, so it is not read")
            if file.is_symlink() and not file.resolve().is_relative_to(self._path):
                raise InputError(f"{name} has a link that leads out of the folder of this server: {file.name}")
        run = RunDirectory.open(found)
        for entry in run.meta().get("servers") or ():  # of a fleet: their folders lie in the run
            member = (found / str(entry.get("name") if isinstance(entry, dict) else entry)).resolve()
            if not member.is_relative_to(found):
                raise InputError(f"{name} names a server whose records lie outside of it")
        return run

    def list_runs(self) -> RunList:
        from sojourn.metrics.run.listing import list_runs

        return RunList(runs=[run for run in list_runs(self._path) if self._is_inside(run.name)])

    def _is_inside(self, name: str) -> bool:
        try:
            self.run(name)
        except InputError:  # it, or a file of it, leads out
            return False
        except RunDataError:  # inside, and unreadable: the list says why
            return True
        return True


def build_server(path: Path, servers: Sequence[str] = ()) -> MCPServer:
    """The server over a folder of runs; `run("stdio")` serves it. `servers`: addresses that watch_server may read."""
    folder = Folder(path)
    watched = {base_of(url) for url in servers}
    server: MCPServer = MCPServer("sojourn", version=own_version(), instructions=INSTRUCTIONS, log_level="WARNING")

    def tool(function: Tool) -> None:
        hints = ToolAnnotations(
            read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
        )
        server.add_tool(_answering(function), annotations=hints)

    def list_runs() -> msgspec.Struct:
        """List the runs, newest first, with scenario, number of requests and the first sentence of the verdict."""
        return folder.list_runs()

    def diagnose(
        run: RunName,
        against: Annotated[str | None, Field(description="a second run, for the symptoms that take two")] = None,
    ) -> msgspec.Struct:
        """Diagnose a run: symptoms, causes with evidence for and against, confidence, the measurement that would prove
        each, the fix and its predicted gain. `warnings`, `unsafe` and checks with status "unknown" are abstentions."""
        from sojourn.scripting.answers import diagnosis_of

        return diagnosis_of(folder.run(run), folder.run(against) if against else None)

    def explain_request(
        run: RunName,
        request_id: Annotated[str, Field(max_length=LONGEST_NAME)],
        token: Annotated[int | None, Field(ge=0, description="explain the time before this output token")] = None,
    ) -> msgspec.Struct:
        """Explain one request: its ledger, what it waited for, which requests delayed it, its slowest tokens."""
        from sojourn.diagnosis.explanation import explanation_of

        return explanation_of(folder.run(run), request_id, token)

    def ledger(
        run: RunName, klass: Annotated[str | None, Field(description="class of requests; by default all")] = None
    ) -> msgspec.Struct:
        """Sum the time of a run's requests by account, up to the last byte and up to the first text."""
        from sojourn.scripting.answers import ledger_of_run

        return ledger_of_run(folder.run(run), klass)

    def replay(
        run: RunName,
        changes: Annotated[
            dict[str, Any],
            Field(description="what to change: a setting (max_num_seqs, num_kv_blocks, prefix_caching, …), "
                              "device_speed, kv_scale, arrival_rate, arrivals, replicas, routing, servers; a list of "
                              "values makes a grid"),
        ],
    ) -> msgspec.Struct:  # fmt: skip
        """Predict what a run would have been with something changed, through the real scheduler on a virtual clock.
        Bounds hold 8 of 10 outcomes. A prediction whose `is_trusted` is false says why in `doubts`."""
        from sojourn.scripting.answers import replay_of
        from sojourn.scripting.changes import changes_of

        asked = changes_of(changes)
        if len(asked) > MOST_REPLAYS:
            raise InputError(f"the changes make {len(asked)} combinations; at most {MOST_REPLAYS} are replayed here")
        return replay_of(folder.run(run), asked)

    def compare(
        a: RunName,
        b: RunName,
        margin: Annotated[float, Field(gt=0, le=1, description="how much worse B may be, as a share of A")] = 0.05,
        confidence: Annotated[float, Field(ge=0.5, le=0.9999)] = 0.95,
        force: Annotated[bool, Field(description="compare runs that differ in load, model or hardware")] = False,
    ) -> msgspec.Struct:
        """Test whether run B is worse than run A beyond a margin: no worse, worse, or cannot tell."""
        from sojourn.metrics.compare.runs import compare_runs

        return compare_runs([folder.run(a)], [folder.run(b)], margin=margin, confidence=confidence, force=force)

    def kv_lens(
        run: RunName,
        with_goodput: Annotated[
            bool, Field(description="also replay the run with twice the KV memory: what it is worth in goodput")
        ] = False,
    ) -> msgspec.Struct:
        """Say what a run's KV cache hit and missed and why, which requests needed the room of evicted blocks, how long
        blocks lived, and what pools of other sizes would have hit, with intervals. `unknown` names what the records
        cannot tell."""
        from sojourn.scripting.answers import kv_lens_of

        return kv_lens_of(folder.run(run), with_goodput=with_goodput)

    def query(
        run: RunName,
        sql: Annotated[str, Field(description="one SELECT, in DuckDB's dialect")],
        most_rows: Annotated[int, Field(ge=1, le=1000)] = 100,
    ) -> msgspec.Struct:
        """Query a run's tables: `requests` (client and server joined: status, klass, tenant, ttft_ms, tpot_ms, e2e_ms,
        ledger_*_ns), `client`, `steps`, `system`, `scrapes`, `sensors`, `kernels`, `kv_events`. At most 1,000 rows and
        20 seconds. `DESCRIBE` is not taken: SELECT * … LIMIT 1 shows the columns."""
        from sojourn.scripting.sql import query as rows_of

        return rows_of(folder.run(run), sql, most_rows)

    def watch_server(
        url: Annotated[str, Field(description="address of a server, or of a Prometheus", max_length=LONGEST_NAME)],
        seconds: Annotated[float, Field(ge=5, le=120, description="of scrapes, once a second")] = 30.0,
        slo: Annotated[str | None, Field(description="objectives in ms: 'ttft:500 tpot:50'")] = None,
    ) -> msgspec.Struct:
        """Watch a live server (Sojourn, vLLM, SGLang) by its own metrics: what it suffers from now, with evidence.
        Sends no load. `unknown` names what its metrics cannot tell, and the switch that would tell it."""
        from sojourn.live.watch.watcher import watch_once

        if base_of(url) not in watched:
            known = f"it may read {', '.join(sorted(watched))}" if watched else "it may read none"
            raise InputError(f"{url} was not named when this server was started (sojourn mcp --watch URL); {known}")
        try:
            return watch_once([url], seconds, parse_bounds(slo, WHAT_SERVERS_TELL) if slo else None)
        except ValueError as error:
            raise InputError(f"slo: {error}") from None

    def triage(
        text: Annotated[
            str,
            Field(description="as pasted: a log, a page of /metrics, a benchmark's result, flags, nvidia-smi",
                  max_length=LONGEST_PASTE),
        ],
        slo: Annotated[str | None, Field(description="objectives in ms: 'ttft:500 tpot:50'")] = None,
    ) -> msgspec.Struct:  # fmt: skip
        """Say what a pasted text shows of a server: what is certain, likely (with confidence, evidence and rivals) and
        unknowable from it, and the one next command. Report what is unknowable as unknown."""
        from sojourn.triage.conclude import triage_given

        try:
            return triage_given(texts={"the text": text}, bounds=parse_bounds(slo, WHAT_SERVERS_TELL) if slo else None)
        except ValueError as error:
            raise InputError(f"slo: {error}") from None

    for function in (
        list_runs, diagnose, explain_request, ledger, replay, compare, kv_lens, query, watch_server, triage,
    ):  # fmt: skip
        tool(function)
    return server


def _answering(function: Tool) -> Callable[..., dict[str, Any]]:
    """The document as a JSON object; an expected failure as a sentence."""

    @functools.wraps(function)
    def answer(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return plain(function(*args, **named))
        except SojournError as error:
            raise ToolError(str(error)) from None

    answer.__annotations__["return"] = dict[str, Any]
    return answer
