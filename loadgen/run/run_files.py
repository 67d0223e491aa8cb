"""Starts a run directory before the load and finishes it after."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from sojourn.interop.sources.view import reported_settings
from sojourn.loadgen.client.event_log import RAW_TABLE, abandoned, discard_progress
from sojourn.loadgen.record.parse import Parsed, build_client_table
from sojourn.loadgen.reference_server.accuracy import with_calibration
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.scenario.workload import Workload
from sojourn.loadgen.schedule.closed_loop import loop_doubt
from sojourn.loadgen.schedule.facts import arrival_facts
from sojourn.loadgen.schedule.ideal_prefix_hits import ideal_hit_rate
from sojourn.loadgen.schedule.request import schedule_files
from sojourn.loadgen.schedule.shards import SHARDS_FILE, doubts_about, read_shards
from sojourn.metrics.compare.comparable import SENT_LATE
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.machine.client_error import beyond_capacity
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.run.directory import RunDirectory, engine_settings, wall_anchor
from sojourn.metrics.run.fleet import describe_servers, gather_servers

ASSUMED_BLOCK_TOKENS = 16  # of our engine and of vLLM by default
UNFINISHED = "the run did not finish"
# A generator that is late by more than this share of the tightest TTFT objective decides by itself who keeps it.
LAG_SHARE_OF_TTFT = 0.10
LAG_BOUND_WITHOUT_TTFT_MS = 50.0


def is_whole(path: Path) -> bool:
    """Whether a folder holds a run that came to its end, valid or not."""
    try:
        return UNFINISHED not in RunDirectory(path).meta().get("invalid_reasons", [])
    except RunDataError:
        return False


def begin_run(
    run_dir: Path, scenario: Scenario, seed: int, engine: dict[str, Any], command: list[str] | None = None,
    workload: dict[str, Any] | None = None,
) -> RunDirectory:  # fmt: skip
    """Creates the run directory, not valid until it is finished. Raises RunDataError.

    `command`: the words that repeat the run (see `repeat_command`), None where no command does; `workload` as from
    `workload_facts`.
    """
    return create_run(
        run_dir, scenario.model_dump(mode="json"), arrival_facts(scenario, (workload or {}).get("traces", {})),
        [objective.model_dump(mode="json") for objective in scenario.objectives], seed, engine, command, workload,
    )  # fmt: skip


def create_run(
    run_dir: Path, scenario: dict[str, Any], arrivals: dict[str, Any], objectives: list[dict[str, Any]], seed: int,
    engine: dict[str, Any], command: list[str] | None = None, workload: dict[str, Any] | None = None,
) -> RunDirectory:  # fmt: skip
    """The same of blocks as `run.json` has them. `arrivals` as from `arrival_facts`."""
    return RunDirectory.create(
        run_dir,
        {
            "scenario": scenario,
            "seed": seed,
            "command": command,
            "workload": workload or {},
            "arrivals": arrivals,
            "engine": engine,
            "hardware": hardware(),
            "versions": versions(),
            "wall_anchor": wall_anchor(),
            "objectives": objectives,
            "client_error": None,
            "valid": False,
            "load_reasons": [UNFINISHED],  # of `invalid_reasons`, those that no table tells
            "invalid_reasons": [UNFINISHED],
        },
    )


def repeat_command(verb: str, scenario: Scenario, seed: int, **options: Any) -> list[str]:
    """The words that repeat a run, except for its folder. A dict (`set`) gives one KEY=VALUE an entry, and a list
    one option an entry; None gives none."""
    arguments = ["sojourn", verb, scenario.path_or_name]
    for name, value in options.items():
        entries = [f"{key}={_as_yaml(item)}" for key, item in value.items()] if isinstance(value, dict) else value
        entries = entries if isinstance(entries, list) else [entries]
        arguments += [word for entry in entries if entry is not None for word in (f"--{name.replace('_', '-')}", entry)]
    return [*arguments, "--seed", str(seed)]


def _as_yaml(value: Any) -> str:
    """The text that `--set` reads back as this value: 4, true, cpu, '4' for the text."""
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("\n").removesuffix("\n...")


def finish_run(run: RunDirectory, reasons: list[str]) -> Parsed | None:
    """Parses the events, compacts the run and writes whether it is valid; `reasons` are those known already.

    Raises RunDataError where the disk is full or the folder is gone. The run is not valid then, and its parts remain.
    """
    if not run.path.is_dir():
        raise RunDataError(f"{run.path} was removed during the run; nothing of the run remains")
    try:
        parsed = build_client_table(run.path) if schedule_files(run.path) else None
        run.compact()
        gather_servers(run)
        _judge(run, parsed, reasons)
        describe_servers(run)
    except (OSError, pa.ArrowException) as error:
        why = f"the records could not be gathered: {error}"
        with suppress(OSError, RunDataError):  # it says `valid: false` since the run began
            run.update_meta(load_reasons=[*reasons, why], invalid_reasons=[*reasons, why])
        raise RunDataError(
            f"{run.path} is not a valid run, as its records cannot be gathered ({error}); what was recorded remains "
            f"there; make room on the disk, then: sojourn diagnose {run.path}"
        ) from None
    return parsed


def recover(run_dir: Path | str) -> bool:
    """Builds the client table of a run whose processes were killed, or that got events of workers on other hosts since,
    and judges it again. Returns whether there was anything to do.

    Cheap otherwise, and harmless to a run in progress: call it before reading any run.
    """
    run_dir = Path(run_dir)
    segments = run_dir / f"{RAW_TABLE}.parts"
    if not schedule_files(run_dir) or ((run_dir / "client.parquet").exists() and not segments.is_dir()):
        return False
    with abandoned(run_dir) as is_abandoned:
        if is_abandoned:
            run = RunDirectory(run_dir)
            meta = run.meta()
            parsed = build_client_table(run_dir)
            gather_servers(run)
            _judge(run, parsed, meta.get("load_reasons", meta.get("invalid_reasons", [])))
            describe_servers(run)
    return is_abandoned


def _judge(run: RunDirectory, parsed: Parsed | None, reasons: list[str]) -> None:
    """Writes into `run.json` whether the run is valid. `reasons` ended its load; the other reasons follow from the
    records."""
    discard_progress(run.path)
    meta = run.meta()
    shards = read_shards(run.path, meta.get("load_processes") or ())
    client_error = with_calibration(parsed.client_error, parsed.streams, shards) if parsed else None
    found = [*reasons, *doubts_about(shards), *_doubts(parsed, meta["objectives"])]
    arrivals, is_planned = meta["scenario"]["arrivals"], "workload" in meta["scenario"]  # tasks ask for what they send
    elsewhere = sum(shard.requests for shard in shards) - (parsed.num_records if parsed else 0)
    if not is_planned and elsewhere > 0:
        found.append(
            f"{elsewhere} requests were recorded on other hosts; copy their client_raw.parts and schedule.parts here"
        )
    stopped = None if parsed is None or parsed.stopped is None else parsed.stopped
    if (
        parsed
        and is_planned
        and not stopped
        and (doubt := loop_doubt(arrivals, parsed.num_records, parsed.num_never_due, parsed.ran_out))
    ):
        found.append(doubt)
    if client_error and (beyond := beyond_capacity(client_error["calibration"])):
        found.append(beyond)
    run.update_meta(
        load_processes=[asdict(shard) for shard in shards],
        client_error=client_error,
        workload=with_prefix(run, meta, parsed) if parsed else meta.get("workload"),
        **(parsed.said() if parsed else {"reply_notes": []}),
        valid=not found,
        stopped_early=None if stopped is None else {"after_s": round(stopped[0], 3), "reason": stopped[1]},
        load_reasons=reasons,
        invalid_reasons=list(dict.fromkeys(found)),
    )
    (run.path / SHARDS_FILE).unlink(missing_ok=True)


def _doubts(parsed: Parsed | None, objectives: list[dict[str, Any]]) -> list[str]:
    if parsed is None:
        return ["nothing was sent"]
    if not parsed.started:
        return ["the load stopped before its schedule began"]
    found = []
    if parsed.num_unfinished:
        found.append(
            f"{parsed.num_unfinished} of {parsed.num_records} scheduled requests were never sent or have no recorded "
            "end"
        )
    bounds = [objective["ttft_ms"] for objective in objectives if objective.get("ttft_ms")]
    bound_ms = LAG_SHARE_OF_TTFT * min(bounds) if bounds else LAG_BOUND_WITHOUT_TTFT_MS
    late_ms = parsed.client_error["dispatch_p99_ms"]
    if late_ms is not None and late_ms > bound_ms:
        found.append(
            f"{SENT_LATE}: p99 {late_ms:.1f} ms, above {bound_ms:.1f} ms"
            f"{f' ({LAG_SHARE_OF_TTFT:.0%} of the tightest TTFT objective)' if bounds else ''}; "
            "lower the rate, or give it a core of its own, such as `taskset -c 1 sojourn load …`"
        )
    return found


def with_prefix(run: RunDirectory, meta: dict[str, Any], parsed: Parsed) -> dict[str, Any]:
    """The run's `workload` with `prefix`, where its requests share anything."""
    if "workload" not in meta["scenario"]:  # tasks have their own prompts
        return meta.get("workload") or {}
    workload = Workload(**meta["scenario"]["workload"])
    reported = cache_block_tokens(run, meta)
    found = ideal_hit_rate(workload, parsed.sent, parsed.measured, reported or ASSUMED_BLOCK_TOKENS)
    prefix = {} if found is None else {"prefix": found | {"block_tokens_assumed": reported is None}}
    return (meta.get("workload") or {}) | prefix


def cache_block_tokens(run: RunDirectory, meta: dict[str, Any]) -> int | None:
    """Tokens of a block of the server's cache, from its settings or its own report; None if neither says it."""
    size = engine_settings(meta).get("block_size") or reported_settings(run).get("block_size")
    try:
        return max(1, int(size))
    except (TypeError, ValueError):  # a foreign server may call it "auto"
        return None
