"""A probe's folder as a run directory: its streams stay, and our tables are made beside them.

Reading it again while the server runs takes in what came since. The tables follow from the streams, so nothing is lost
when they are made anew.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from sojourn.interop.probe.book import Books
from sojourn.interop.probe.loop import Choice, sequences_of, step_records
from sojourn.interop.probe.machine import system_records
from sojourn.interop.probe.prefixes import with_resized_hits
from sojourn.interop.probe.records import Call, Handled
from sojourn.interop.probe.shape import shape_of
from sojourn.interop.probe.stream import SUFFIX, Stream, is_probe_folder, read_streams
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import TEXT_ACCOUNTS
from sojourn.metrics.machine.host import boot_id, hardware
from sojourn.metrics.records import KvEventRecord, RequestRecord, StepRecord
from sojourn.metrics.records.tables import SCHEMAS, columns
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.run.segments import replace_table
from sojourn.metrics.run.server_alone import SERVER_ALONE
from sojourn.metrics.version import own_version

MADE = ("steps", "requests", "system", "kv_events")  # the tables
# Accounts of which no reading of the probe tells: their time lies in others, or the server has no such thing.
UNSEEN_ACCOUNTS = (
    "token.sample", "compute.draft", "compute.communication", "compute.bubble", "memory.load", "memory.store",
    "request.lost",
)  # fmt: skip
# vLLM's identities of its requests: what kind of call, the caller's identity, which prompt, and a random end.
_RANDOM_END = re.compile(r"-[0-9a-f]{8}$")
_PROMPT = re.compile(r"-\d+$")
_KIND = re.compile(r"^[a-z]+-")
_CHOICE = re.compile(r"^\d+_")


def open_server_run(path: Path | str, objectives: Sequence[Mapping[str, Any]] | None = None) -> RunDirectory:
    """A run directory of our server, or what a probe recorded in a foreign one. `objectives` stand in for its own.

    Raises RunDataError."""
    path = Path(path)
    if is_probe_folder(path):
        import_probe(path)
    return RunDirectory.open(path, objectives)


def import_probe(folder: Path) -> RunDirectory:
    """Makes `run.json` and the tables of steps, requests and the machine from the streams, unless they are of these
    streams already. Raises RunDataError."""
    run, of = RunDirectory(folder), _sizes(folder)
    if _is_made(run, of):
        return run
    meta, tables = run_of(folder, read_streams(folder))
    meta["probe"] |= of
    try:
        run.set_report_aside()
        (folder / "diagnosis.json").unlink(missing_ok=True)  # it was made of what the streams held before
        run.write_json("run.json", meta)
        for table, content in tables.items():
            replace_table(folder / f"{table}.parquet", content)
    except (OSError, pa.ArrowException) as error:
        raise RunDataError(f"the tables of {folder} cannot be written there: {error}; copy the folder first") from None
    return run


def _sizes(folder: Path) -> dict[str, Any]:
    """What the tables are made of: the streams with their bytes, and the program that reads them."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob(f"*{SUFFIX}"))}
    return {"stream_bytes": sizes, "imported_by": own_version()}


def _is_made(run: RunDirectory, of: Mapping[str, Any]) -> bool:
    try:
        made = section(run.meta(), "probe")
    except RunDataError:  # none yet, or damaged
        return False
    return {name: made.get(name) for name in of} == of and all((run.path / f"{name}.parquet").exists() for name in MADE)


def run_of(folder: Path, streams: Sequence[Stream]) -> tuple[dict[str, Any], dict[str, pa.Table]]:
    """`run.json` and the tables that follow from the streams of a folder. Raises RunDataError."""
    cores = [stream for stream in streams if stream.start.role == "core"]
    fronts = [stream for stream in streams if stream.start.role == "front"]
    if not cores:
        raise RunDataError(
            f"{folder} has no stream of an engine's loop; start the server with --scheduler-cls "
            "sojourn_probe.vllm.Scheduler, and look for a line of sojourn-probe in its log"
        )
    _refuse_several_at_once(folder, cores)
    calls = {call.request: call for stream in fronts for call in stream.calls}
    handled = {each.request: each for stream in fronts for each in stream.handled}
    steps: list[StepRecord] = []
    requests: list[RequestRecord] = []
    events: list[KvEventRecord] = []
    for core in cores:
        if core is not cores[0]:
            events.append(KvEventRecord(core.start.monotonic_ns, "cleared"))
        of_core, ended, of_blocks = _records_of(core, len(steps), calls, handled)
        steps += of_core
        requests += ended
        events += of_blocks
    requests += _refused(calls, {each.request_id for each in requests})
    made = {
        "steps": steps, "requests": requests, "system": system_records(cores, fronts), "kv_events": events,
    }  # fmt: skip
    tables = {name: columns(name, rows) if rows else SCHEMAS[name].empty_table() for name, rows in made.items()}
    return _description(cores[-1], fronts, streams), tables


def _records_of(
    core: Stream, first: int, calls: dict[str, Call], handled: dict[str, Handled]
) -> tuple[list[StepRecord], list[RequestRecord], list[KvEventRecord]]:
    steps = sorted((step for step in core.steps if step.handles), key=lambda step: step.planned_ns)
    owners = {each.handle: call_name(each.request, calls) for each in core.arrived}
    names, seen = {}, dict[str, int]()
    for handle, owner in owners.items():
        number = seen[owner] = seen.get(owner, -1) + 1
        names[handle] = f"{owner}#{number}" if number else owner
    choices = sequences_of(core, steps, names)
    shape = shape_of(core.start.shape)
    records = step_records(steps, first, choices, shape)
    books = Books(steps, records, shape)
    prefixes = core.prefixes
    by_call: dict[str, list[Choice]] = {}
    for handle, choice in choices.items():
        by_call.setdefault(owners[handle], []).append(choice)
    ended = [
        books.record(name, found, calls.get(name), handled, prefixes, names)
        for name, found in by_call.items()
        if all(each.ended_ns is not None for each in found)
    ]
    pool_blocks = core.steps[-1].blocks if core.steps else 0
    return records, with_resized_hits(ended, prefixes.block_size, pool_blocks), prefixes.events_of(names)


def call_name(internal: str, calls: dict[str, Call]) -> str:
    """The caller's identity within the engine's own; the engine's own where no recorded call had it."""
    name = _RANDOM_END.sub("", internal)
    candidates = [name, _PROMPT.sub("", name)]
    candidates += [_CHOICE.sub("", each) for each in candidates]
    candidates += [_KIND.sub("", each) for each in candidates]
    return next((each for each in candidates if each in calls), internal)


def _refused(calls: dict[str, Call], known: set[str]) -> list[RequestRecord]:
    """Calls that the server refused before its engine saw them."""
    return [
        RequestRecord(
            request_id=call.request, arrived_ns=call.arrived_ns, finished_ns=call.finished_ns,
            written_ns=call.written_ns or None, error=f"HTTP {call.status}", session=call.session,
            traceparent=call.traceparent,
        )
        for call in calls.values()
        if call.request not in known and call.status >= 400
    ]  # fmt: skip


def _refuse_several_at_once(folder: Path, cores: Sequence[Stream]) -> None:
    for before, after in pairwise(cores):
        if before.steps and before.steps[-1].end_ns > after.start.monotonic_ns:
            raise RunDataError(
                f"{folder} has streams of engines that ran at the same time (data parallel); their steps are no one "
                "run: move each engine's core-*.probe to a folder of its own, with the front-*.probe beside it"
            )


def _description(core: Stream, fronts: Sequence[Stream], streams: Sequence[Stream]) -> dict[str, Any]:
    """The content of `run.json`."""
    start, settings = core.start, dict(core.start.settings)
    threads = settings.pop("threads", None)
    shape = shape_of(start.shape)
    here = start.boot_id is not None and start.boot_id == boot_id()
    bounds = {name: settings.pop(f"objective_{name}", None) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    bounds = {name: bound for name, bound in bounds.items() if bound}
    return {
        "scenario": {"name": start.engine, "description": "whatever clients sent"},
        "seed": None,
        "engine": engine_of(settings),
        "hardware": hardware() if here else {"boot_id": start.boot_id},
        "versions": {start.engine: start.engine_version, "sojourn-probe": start.probe_version},
        "wall_anchor": {"monotonic_ns": start.monotonic_ns, "unix_ns": start.unix_ns},
        "objectives": [{"klass": "all", "source": "set by hand"} | bounds] if bounds else [],
        "client_error": None,
        "valid": False,
        "invalid_reasons": [SERVER_ALONE],
        "model_shape": None if shape is None else msgspec.to_builtins(shape),
        "core": {
            "device": settings.get("device"),
            "dtype": settings.get("dtype"),
            "threads": threads,
            "num_kv_blocks": core.steps[-1].blocks if core.steps else settings.get("num_kv_blocks"),
            "block_size": settings.get("block_size"),
        },
        "probe": {
            "engine": start.engine,
            "engine_version": start.engine_version,
            "unseen": [*start.unseen, *_unseen(fronts, shape is not None)],
            "unseen_accounts": [*UNSEEN_ACCOUNTS, *(() if _sees_text(fronts) else TEXT_ACCOUNTS)],
            "dropped_records": sum(stream.dropped for stream in streams),
        },
    }


def _unseen(fronts: Sequence[Stream], has_shape: bool) -> list[str]:
    found = []
    if not fronts:
        found.append("arrival, text and socket are not seen: the server runs without sojourn_probe.vllm.Middleware")
    elif not _sees_text(fronts):
        found.append(
            "the front does not tell when it made tokens of a prompt and text of tokens: token.encode lies in "
            "request.admission, and token.decode in request.stream"
        )
    if not has_shape:
        found.append("a step is divided by tokens: the probe does not know what this model computes for a token")
    return found


def _sees_text(fronts: Sequence[Stream]) -> bool:
    return any(stream.handled for stream in fronts)


def engine_of(settings: dict[str, Any]) -> dict[str, Any]:
    """vLLM's settings as our engine's, where both mean the same; the others under vLLM's names."""
    found = dict(settings)
    if (weights := found.get("quantization") or found.get("dtype")) is not None:
        found["weights"] = weights
    if (eager := found.pop("enforce_eager", None)) is not None:
        found["graphs"] = "off" if eager else "on"
    if (overlaps := found.pop("async_scheduling", None)) is not None:
        found["overlap"] = "on" if overlaps else "off"
    if not found.pop("chunked_prefill", True) or not found.get("long_prefill_token_threshold"):
        found.pop("long_prefill_token_threshold", None)
    else:
        found["max_prefill_chunk_tokens"] = found.pop("long_prefill_token_threshold")
    for theirs, ours in (("tensor_parallel_size", "tensor_parallel"), ("pipeline_parallel_size", "pipeline_parallel")):
        if theirs in found:
            found[ours] = found.pop(theirs)
    return found
