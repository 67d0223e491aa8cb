"""What a run answers, as documents: used by the command line, by `sojourn.open` and by the MCP server."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import pandas as pd

from sojourn.diagnosis.verdict import Diagnosis
from sojourn.live.kv_lens.document import KvLens, Worth
from sojourn.metrics.errors import ReplayError, RunDataError
from sojourn.metrics.ledger import ACCOUNTS, UNACCOUNTED
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.join import uncertainty_sentence
from sojourn.metrics.run.server_alone import is_server_alone, requests_of
from sojourn.scripting.documents import Ledger, Replay, RunToRun

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Change
    from sojourn.replay.predictor import ReplayPredictor


def diagnosis_of(run: RunDirectory, against: RunDirectory | None = None, *, fresh: bool = False) -> Diagnosis:
    """The diagnosis that lies with the run, if it is of this version and of all its requests; else, and with `against`
    or `fresh`, one made now. Writes nothing."""
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.live.watch.recorded import diagnose_recorded
    from sojourn.scripting.predictor import predictor

    if against is None and not fresh and (file := run.current_diagnosis()) is not None:
        try:
            stored = msgspec.json.decode(file.read_bytes(), type=Diagnosis)
        except (OSError, msgspec.MsgspecError):  # of another version, or damaged: it is made again
            stored = None
        if stored is not None and stored.against is None:
            return stored
    expected = with_expectation(run)
    return diagnose_recorded(expected, against, predictor(expected))


def replay_of(run: RunDirectory, changes: "Sequence[Change]", *, processes: int = 1) -> Replay:
    """Replays a run with each of the changes. Raises ReplayError."""
    from sojourn.replay.predictor import predictor_of

    return replayed(predictor_of(run, processes=processes), changes)


def replayed(predictor: "ReplayPredictor", changes: "Sequence[Change]") -> Replay:
    """What a predictor says of changes, with the recorded run and the check beside it."""
    from sojourn.metrics.prediction import Change

    for change in changes:
        predictor.check(change)
    unchanged, *predictions = predictor.predict([Change(), *changes])
    spread = predictor.spread
    return Replay(
        run=predictor.run.name,
        recorded=predictor.recorded | {"preemptions": predictor.recorded_preemptions},
        step_model_error=predictor.model_error,
        larger_steps_error=spread.error_beyond,
        run_to_run=RunToRun(speed=spread.speed, repeats=spread.repeats),
        rests_on=predictor.sentence(),
        unchanged=unchanged,
        predictions=predictions,
    )


def kv_lens_of(run: RunDirectory, *, with_goodput: bool = True) -> KvLens:
    """What the run's cache held, evicted and would gain from more memory; with replays of twice the memory where the
    run has what they need. Raises RunDataError where it tells nothing of its cache."""
    from sojourn.live.kv_lens.of_run import lens_of_run

    found = lens_of_run(run)
    if not with_goodput or found.pool_blocks is None or found.source != "records":
        return found
    try:
        worth = _worth_of_twice(run, found.pool_blocks)
    except ReplayError as error:
        unknown = f"what twice the memory is worth in goodput: {error}"
        return msgspec.structs.replace(found, unknown=[*found.unknown, unknown])
    return msgspec.structs.replace(found, worth=worth)


def _worth_of_twice(run: RunDirectory, pool_blocks: int) -> Worth:
    """Raises ReplayError."""
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.live.kv_lens.words import worth_of
    from sojourn.metrics.prediction import Change
    from sojourn.metrics.run.directory import section

    judged = with_expectation(run)
    if not judged.meta().get("objectives"):
        raise ReplayError("the run has no objectives, so it has no goodput; `sojourn replay` takes --slo")
    found = replay_of(judged, [Change(kv_scale=2.0)])
    per_token = section(run.meta(), "model_shape").get("kv_bytes_per_token")
    size = section(run.meta(), "core").get("block_size")
    return worth_of(2.0, found.unchanged, found.predictions[0], pool_blocks, per_token and size and per_token * size)


def ledger_of_run(run: RunDirectory, klass: str | None = None) -> Ledger:
    """The ledger of the measured requests of a run, summed. Raises RunDataError for a class that is not there."""
    meta = run.meta()
    rows = measured(requests_of(run, meta), meta)
    if klass is not None:
        classes = sorted(rows.klass.dropna().unique())
        if klass not in classes:
            raise RunDataError(f"the run has no class {klass}; it has {', '.join(classes) or 'none'}")
        rows = rows[rows.klass == klass]
    unknown = []
    seen = rows[rows.unaccounted_ns.notna()]
    if len(seen) < len(rows):
        unknown.append(f"{len(rows) - len(seen)} of {len(rows)} requests have no server records, or were not served")
    if is_server_alone(run, meta):
        unknown.append("no client measured this run, so client.lag and client.network are not known")
    if note := uncertainty_sentence(meta):
        unknown.append(note)
    return Ledger(
        run=run.name, klass=klass, requests=len(rows), seen=len(seen), unknown=unknown,
        ledger_ns=_sums(seen, "ledger", "unaccounted_ns"), ttft_ledger_ns=_sums(seen, "ttft", "ttft_unaccounted_ns"),
    )  # fmt: skip


def _sums(rows: pd.DataFrame, prefix: str, rest: str) -> dict[str, float]:
    """Only the accounts that hold time, in the order of the ledger."""
    booked = {info.name: float(rows[f"{prefix}_{info.column}"].astype("float64").sum()) for info in ACCOUNTS}
    booked[UNACCOUNTED] = float(rows[rest].astype("float64").sum())
    return {name: ns for name, ns in booked.items() if abs(ns) >= 1000}
