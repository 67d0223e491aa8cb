"""A run as an object: its tables as DataFrames, and its answers."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.interop.probe.folder import open_server_run
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

    from sojourn.diagnosis.explanation import Explanation
    from sojourn.diagnosis.verdict import Diagnosis
    from sojourn.live.kv_lens.document import KvLens
    from sojourn.metrics.compare.verdict import Comparison
    from sojourn.scripting.documents import Ledger, Replay
    from sojourn.scripting.figures import Figures

RUNS = Path("runs")


class Run:
    """One run. Tables are read when they are first used, and kept: open the run again to see what was recorded since.

    Times ending with `_ns` are integer nanoseconds of the monotonic clock, latencies ending with `_ms` milliseconds.
    """

    def __init__(self, directory: RunDirectory):
        self.directory = directory

    @classmethod
    def open(cls, path: Path | str) -> "Run":
        """By path, or by its name in runs/. Builds the client's table where a load generator was killed. Raises
        RunDataError."""
        path = Path(path)
        found = RUNS / path if not path.exists() and (RUNS / path).is_dir() else path
        if found.is_dir():
            from sojourn.loadgen.run.run_files import recover

            recover(found)
        return cls(open_server_run(found))

    def __repr__(self) -> str:
        return f"sojourn.open({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def meta(self) -> dict[str, Any]:
        """What run.json says: scenario, settings, hardware, versions."""
        return self.directory.meta()

    @cached_property
    def requests(self) -> "pd.DataFrame":
        """One row a request, client and server joined, with `ttft_ms`, `tpot_ms`, `e2e_ms` and the ledger. Of a run
        that only a server recorded, the server's stamps stand for a client's."""
        from sojourn.metrics.run.server_alone import requests_of

        return requests_of(self.directory, self.meta)

    @cached_property
    def client(self) -> "pd.DataFrame":
        """One row a request as the client saw it."""
        return self.directory.table("client")

    @cached_property
    def steps(self) -> "pd.DataFrame":
        """One row an engine step; empty where no server recorded them. Raises InputError for a fleet: steps of several
        servers are no one stream, and each of `servers` has its own."""
        if names := [server.name for server in self.servers]:
            raise InputError(
                f"{self.name} is a fleet, and steps are of a server: sojourn.open({str(self.path / names[0])!r})"
            )
        return self.directory.table("steps")

    @cached_property
    def servers(self) -> "list[Run]":
        """The runs of the servers of a fleet; [] of a run of one server."""
        from sojourn.metrics.run.fleet import servers_of

        return [Run(server) for server in servers_of(self.directory)]

    def table(self, name: str) -> "pd.DataFrame":
        """A table: client, requests (the server's), steps, system, scrapes, sensors, kernels, kv_events."""
        from sojourn.metrics.records.tables import SCHEMAS

        if name not in SCHEMAS:
            raise InputError(f"a run has no table {name}; it has {', '.join(SCHEMAS)}")
        return self.directory.table(name)

    def diagnose(self, against: "Run | Path | str | None" = None, *, fresh: bool = False) -> "Diagnosis":
        """The diagnosis that lies with the run, or one made now: with `fresh`, with a second run, or if there is none.
        Writes nothing."""
        from sojourn.scripting.answers import diagnosis_of

        return diagnosis_of(self.directory, _directory(against) if against is not None else None, fresh=fresh)

    def explain(self, request_id: str, token: int | None = None) -> "Explanation":
        """Where the time of one request went; with `token`, what it waited for before that output token."""
        from sojourn.diagnosis.explanation import explanation_of

        return explanation_of(self.directory, request_id, token)

    def ledger(self, request_id: str | None = None) -> "pd.Series":
        """Account → milliseconds up to the last byte: of one request, or the mean over those with server records."""
        import pandas as pd

        from sojourn.scripting.answers import ledger_of_run

        if request_id is not None:
            booked, count = self.explain(request_id).ledger_ns, 1
        else:
            found = ledger_of_run(self.directory)
            booked, count = found.ledger_ns, max(found.seen, 1)
        return pd.Series({name: ns / 1e6 / count for name, ns in booked.items()}, name="ms", dtype="float64")

    def ledger_totals(self, klass: str | None = None) -> "Ledger":
        """The ledger summed over all measured requests, or over those of a class."""
        from sojourn.scripting.answers import ledger_of_run

        return ledger_of_run(self.directory, klass)

    def compare(self, other: "Run | Path | str", **options: Any) -> "Comparison":
        """Whether `other` is worse than this run. `options`: see `metrics.compare.runs.compare_runs`."""
        from sojourn.metrics.compare.runs import compare_runs

        return compare_runs([self.directory], [_directory(other)], **options)

    def replay(self, *, processes: int = 1, **changes: Any) -> "Replay":
        """What the run would have been with something changed: `run.replay(max_num_seqs=[32, 64], device_speed=2)`.

        Names are those of `sojourn replay --set`; a list of values makes a grid; `removed={"client.network": 1}` takes
        time of an account away. Raises InputError and ReplayError.
        """
        from sojourn.scripting.answers import replay_of
        from sojourn.scripting.changes import changes_of

        return replay_of(self.directory, changes_of(changes), processes=processes)

    def kv_lens(self, *, with_goodput: bool = False) -> "KvLens":
        """What the KV cache held, evicted and missed, and what more memory would hit. `with_goodput`: with replays that
        say what twice the memory is worth. Raises RunDataError where the run tells nothing of its cache."""
        from sojourn.scripting.answers import kv_lens_of

        return kv_lens_of(self.directory, with_goodput=with_goodput)

    @cached_property
    def figures(self) -> "Figures":
        """Plotly figures, as the app draws them. Needs the ui extra."""
        from sojourn.scripting.figures import Figures

        return Figures.of(self.path)


def _directory(run: "Run | Path | str") -> RunDirectory:
    return run.directory if isinstance(run, Run) else Run.open(run).directory
