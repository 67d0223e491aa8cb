"""What the pages and the report show of one run: its tables, its diagnosis, and sentences for what is not there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec
import pandas as pd
import pyarrow as pa

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.expectation import with_expectation
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.interop.sources.view import timeline
from sojourn.metrics.cells import flat_frame
from sojourn.metrics.compute.roofline import Ceilings, load_ceilings
from sojourn.metrics.compute.utilisation import arithmetic, ceilings_from
from sojourn.metrics.errors import CalibrationError, RunDataError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.request.goodput import measured, measured_steps
from sojourn.metrics.request.offenders import Book, TooLarge, book_of
from sojourn.metrics.results.replicas import FleetView, fleet_view
from sojourn.metrics.run.directory import RunDirectory, engine_settings, frame_of, server_hardware
from sojourn.metrics.run.segments import STREAM
from sojourn.metrics.run.server_alone import is_server_alone, meta_of, requests_of
from sojourn.ui import large_run
from sojourn.ui.tables.request import chosen

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class RunData:
    """One run, read once. `requests` is client and server joined; times are in ns of the monotonic clock."""

    name: str
    path: Path
    meta: dict[str, Any]
    requests: pd.DataFrame  # those that count, or a sample; numeric columns are float64, NaN where unknown
    warmup: int  # requests that the scenario's `measure` block leaves out
    open_steps: Callable[[], pd.DataFrame]  # in order of `step`, from the first due time of `requests` on
    diagnosis: Diagnosis | None
    no_diagnosis: str  # why there is none, "" where there is one
    recording: bool  # segments not yet compacted: the run goes on, or was cut short
    begin_ns: float  # of the first request or step, else of the first scrape: second 0 of every time axis
    server: pd.DataFrame  # what the server's own metrics showed at each scrape; empty where it recorded requests for us
    system: pd.DataFrame
    kernels: pd.DataFrame  # of profile bursts
    ceilings: Ceilings | None  # of the device of the run
    no_ceilings: str  # why there are none, "" where there are some
    precision: str  # of the run's arithmetic, as the ceilings name it
    key: str = ""  # of what is computed from it: its path, the state of its files, and what a filter leaves of it
    sent: int = 0  # requests without a filter, and steps
    count_steps: Callable[[], int] = lambda: 0
    sampled_of: int = 0  # requests of the run where `requests` are a sample, else 0
    extremes: pd.DataFrame | None = None  # requests that a sample would miss: the slowest ones, the first ones
    fleet: FleetView | None = None  # of several servers; each has a run of its own below this one
    server_alone: bool = False  # no client measured it: the server's stamps stand in for a client's
    open_book: Callable[[], tuple[Book | None, str]] = lambda: (None, "")  # made when first asked for, then kept

    def beside(self, other: "RunData") -> "RunData":
        """This run, with a key for what is made of both."""
        return replace(self, key=f"{self.key} beside {other.key}")

    @property
    def steps(self) -> pd.DataFrame:
        return self.open_steps()

    @property
    def has_steps(self) -> bool:
        """Without reading those of a large run."""
        return bool(RunDirectory(self.path).sources("steps")) if self.sampled_of else self.count_steps() > 0

    @property
    def is_sample(self) -> bool:
        """Whether `requests` are some of those of the run; steps may be a sample also where they are all."""
        return self.sent < self.sampled_of

    @property
    def num_requests(self) -> int:
        """Of the run, as the filter leaves them: of a sample, those that it stands for."""
        return round(len(self.requests) * self.sampled_of / self.sent) if self.sampled_of else len(self.requests)

    def ordered(self, order: str, count: int) -> pd.DataFrame:
        """The first requests in an order, as `tables.request.chosen`; of a sample also those beside it."""
        rows = self.requests if self.extremes is None else pd.concat([self.requests, self.extremes])
        return chosen(rows.drop_duplicates("request_id"), order, count)

    def request(self, request_id: str) -> pd.Series | None:
        """A request of the run that passes the filter; of a sample any request of its files."""
        found = self.requests[self.requests.request_id == request_id]
        if found.empty and self.extremes is not None:
            found = self.extremes[self.extremes.request_id == request_id]
        if found.empty and self.sampled_of and len(self.requests) == self.sent:
            run = RunDirectory(self.path)
            found = _joined(run, *large_run.looked_up(run, request_id))
        return None if found.empty else found.iloc[0]

    def steps_of(self, request: pd.Series) -> pd.DataFrame:
        """The steps between the first and the last one of a request."""
        first, last = request.first_step, request.last_step
        if not self.sampled_of or pd.isna(first):
            return self.steps[self.steps.step.between(first, last)]
        return _numeric(flat_frame(large_run.steps_between(RunDirectory(self.path), first, last)))

    @property
    def book(self) -> Book | None:
        """Who delayed whom, in the whole run."""
        return self.open_book()[0]

    @property
    def no_book(self) -> str:
        """Why there is no book, "" where there is one."""
        return self.open_book()[1]

    @property
    def has_ledger(self) -> bool:
        """Whether any request has the server's accounts; a foreign server records none."""
        return bool(self.requests.unaccounted_ns.notna().any())


def shown_name(run: RunDirectory, meta: dict[str, Any]) -> str:
    """The name of `run_list.run_names`."""
    return f"{run.path.resolve().parent.name}/{run.name}" if meta.get("fleet") else run.name


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every file of a run: what a cache of it must be keyed by."""
    stamps = []
    for file in sorted(path.rglob("*")):
        try:
            status = file.stat()
        except FileNotFoundError:  # a segment that was compacted in between
            continue
        if file.suffix in (".parquet", STREAM, ".json"):
            stamps.append((file.relative_to(path).as_posix(), status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def load(
    path: Path | str, diagnosis: Diagnosis | None = None, objectives: Sequence[Mapping[str, Any]] | None = None
) -> RunData:
    """Reads a run directory, and its diagnosis unless one is given. `objectives` stand in for those of the run.

    Raises RunDataError if it cannot be read.
    """
    run = RunDirectory.open(path, objectives)
    if large_run.is_large(run):
        return _load_sample(run, meta_of(run), diagnosis)
    run = with_expectation(run)
    meta = meta_of(run)
    recorded = _numeric(requests_of(run, run.meta()))
    requests = measured(recorded, meta)
    spans = measured_steps(_numeric(flat_frame(run.arrow("steps", ("begin_ns", "end_ns")))), requests)
    recorded_steps = once_made(lambda: run.arrow("steps"))
    steps = once_made(
        lambda: measured_steps(_numeric(flat_frame(recorded_steps())), requests).sort_values("step", ignore_index=True)
    )
    reason = ""
    if diagnosis is None:
        diagnosis, reason = read_diagnosis(run, empty=requests.empty)
    starts = pd.concat([requests.due_ns, spans.begin_ns]).dropna()
    loaded = _data(run, meta, requests, diagnosis, reason, starts)
    return replace(
        loaded,
        warmup=len(recorded) - len(requests),
        open_steps=steps,
        count_steps=lambda: len(spans),
        fleet=fleet_view(run, requests),
        open_book=once_made(lambda: _book(run, recorded_steps())),
    )


def _load_sample(run: RunDirectory, meta: dict[str, Any], diagnosis: Diagnosis | None) -> RunData:
    """Steps are read when a page asks for them: they take longest."""
    drawn = large_run.drawn_requests(run, meta)
    every = _joined(run, drawn.client, drawn.server)
    is_sampled = every.request_id.isin(drawn.sampled)
    requests = every[is_sampled].reset_index(drop=True)
    reason = ""
    if diagnosis is None and run.current_diagnosis() is not None:
        diagnosis, reason = read_diagnosis(run)
    elif diagnosis is None:
        reason = f"A run of {drawn.total:,} requests is not diagnosed by the app: run sojourn diagnose {run.path}"
    steps = once_made(lambda: large_run.drawn_steps(run, drawn.first_due_ns))
    frame = once_made(lambda: _numeric(flat_frame(steps()[0])))
    return replace(
        _data(run, meta, requests, diagnosis, reason, pd.Series([float(drawn.first_due_ns)])),
        warmup=drawn.warmup,
        open_steps=frame,
        count_steps=lambda: steps()[1],
        sampled_of=drawn.total,
        extremes=every[~is_sampled].reset_index(drop=True),
        open_book=once_made(lambda: _book(run, None)),
    )


def _joined(run: RunDirectory, client: pa.Table, server: pa.Table) -> pd.DataFrame:
    return _numeric(run.requests(frame_of(client), frame_of(server)))


def _data(
    run: RunDirectory, meta: dict[str, Any], requests: pd.DataFrame, diagnosis: Diagnosis | None, reason: str,
    starts: pd.Series,
) -> RunData:  # fmt: skip
    """What small and large runs have alike. `starts` are moments at which requests and steps began."""
    ceilings, no_ceilings = _ceilings(meta)
    server = timeline(run) if requests.arrived_ns.isna().all() else pd.DataFrame()
    return RunData(
        name=shown_name(run, meta),
        path=run.path,
        meta=meta,
        requests=requests,
        warmup=0,
        open_steps=SCHEMAS["steps"].empty_table().to_pandas,
        diagnosis=diagnosis,
        no_diagnosis=reason,
        recording=any((run.path / f"{table}.parts").is_dir() for table in SCHEMAS),
        begin_ns=float(starts.min()) if len(starts) else float(server.index.min()) if len(server) else 0.0,
        server=server,
        system=_during(_numeric(run.table("system")), starts),
        kernels=run.table("kernels"),
        ceilings=ceilings,
        no_ceilings=no_ceilings,
        key=f"{run.path.resolve()} {fingerprint(run.path)}",
        sent=len(requests),
        server_alone=is_server_alone(run, run.meta()),
        precision=arithmetic(meta) or str(engine_settings(meta).get("dtype") or "float32"),
    )


def read_diagnosis(run: RunDirectory, empty: bool = False) -> tuple[Diagnosis | None, str]:
    """The diagnosis that was written with the run, or one made now; else None and the reason in a sentence."""
    if (file := run.current_diagnosis()) is not None:
        try:
            return msgspec.json.decode(file.read_bytes(), type=Diagnosis), ""
        except msgspec.MsgspecError as error:
            return None, f"{file.name} cannot be read ({error}); write it again with: sojourn diagnose {run.path}"
    if empty and not run.meta().get("invalid_reasons"):
        return None, "No request has been recorded yet, so there is nothing to diagnose."
    try:
        return diagnose(run), ""
    except RunDataError as error:
        return None, str(error)


def once_made(make: Callable[[], Made]) -> Callable[[], Made]:
    """Makes it when it is first asked for; who asks meanwhile waits."""
    lock, made = Lock(), []

    def given() -> Made:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return given


def _book(run: RunDirectory, steps: pa.Table | None) -> tuple[Book | None, str]:
    try:
        book = book_of(run, steps)
    except TooLarge as error:
        return None, str(error)
    if book is None:
        return None, "The server recorded no steps or no requests, so waits cannot be attributed to other requests."
    return book, ""


def _ceilings(meta: dict[str, Any]) -> tuple[Ceilings | None, str]:
    """The measured limits of the device that a run was computed on, or None and the reason in a sentence."""
    if (found := ceilings_from(meta)) is not None:
        return found, ""
    machine = server_hardware(meta)
    if not machine:
        return None, "The run does not name its machine, so its ceilings are unknown."
    gpus = machine.get("gpus") or []
    on_gpu = gpus and str(engine_settings(meta).get("device", "")) not in ("cpu", "")
    name = gpus[0].get("name") if on_gpu else f"{machine.get('cpu')}, {machine.get('cores')} cores"
    try:
        return load_ceilings(str(name)), ""
    except CalibrationError as error:
        return None, f"The ceilings of this run's device are not known here: {error}."


def _during(system: pd.DataFrame, starts: pd.Series) -> pd.DataFrame:
    """Without the seconds in which the server started and the load was prepared."""
    return system[system.ns >= starts.min()].sort_values("ns", ignore_index=True) if len(starts) else system


def _numeric(table: pd.DataFrame) -> pd.DataFrame:
    """Numeric columns as float64 also where every value is null, which no type can be told from."""
    fields = [field for schema in SCHEMAS.values() for field in schema]
    numeric = {field.name for field in fields if str(field.type) in ("int64", "double")}
    numeric |= {f"server_{name}" for name in numeric}
    numeric |= {"unaccounted_ns", "ttft_unaccounted_ns", "ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms"}
    return table.astype({name: "float64" for name in table.columns if name in numeric})
