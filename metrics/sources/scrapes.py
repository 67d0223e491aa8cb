"""The scrapes of a run as series: by how much each grew over a span of time, and what each gauge showed.

A counter that falls was reset by a restart of its server: it grew by what it shows since then, and what it had gained
between the last scrape and the restart is lost. A series that is not there at the first scrape began at 0. A gauge is
known at the moments of the scrapes only.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from metrics.errors import RunDataError
from metrics.run.directory import RunDirectory

# Written beside the server's samples, as Prometheus names them: did the scrape succeed, and how long did it take?
UP, DURATION = "up", "scrape_duration_seconds"
STARTED = "process_start_time_seconds"  # of prometheus_client: when the process behind a page began

_SERIES = "cast(to_json(labels) as varchar) as series"
_SAMPLES = "samples as (select * from read_parquet($files, union_by_name=true))"
_CHOSEN = f"""with {_SAMPLES}, chosen as (
    select * from samples where list_contains($names, name) and ns between $begin and $end
)"""
_STEPS = f"""{_CHOSEN}, ordered as (
    select *, lag(value) over (partition by name, labels order by ns) as before from chosen
), steps as (
    select ns, name, labels, value < before as fell, case
        when before is null then case when ns = $begin then 0 else value end
        when value < before then value
        else value - before end as step
    from ordered
)"""


@dataclass(frozen=True, slots=True)
class ScrapeSummary:
    """How the scraping of a run went. Times are nanoseconds of the monotonic clock of the host that scraped."""

    answered_ns: np.ndarray  # [answered] in order of time
    failed: int
    slowest_s: float | None  # None where no scrape has its duration
    restarts: int  # times that the server began anew, as its counters or its process tell

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two scrapes that were answered: what came and went in it is not seen."""
        return float(np.diff(self.answered_ns).max()) / 1e9 if len(self.answered_ns) > 1 else 0.0


def scrape_summary(run: RunDirectory) -> ScrapeSummary:
    """How the scraping went; nothing answered where the run has no scrapes."""
    rows = _query(
        run,
        f"with {_SAMPLES} select ns, min(value) filter (name = '{UP}') as up, "
        f"max(value) filter (name = '{DURATION}') as took, max(value) filter (name = '{STARTED}') as started "
        "from samples group by ns order by ns",
    )
    if rows.empty:
        return ScrapeSummary(np.empty(0, "int64"), 0, None, 0)
    answered = rows[rows.up.isna() | (rows.up > 0)]
    started = answered.started.dropna()
    return ScrapeSummary(
        answered_ns=answered.ns.to_numpy("int64"),
        failed=int(len(rows) - len(answered)),
        slowest_s=float(rows.took.max()) if rows.took.notna().any() else None,
        restarts=int((started.diff().abs() > 0).sum()),
    )


def names(run: RunDirectory) -> set[str]:
    """The names of all samples that the server gave."""
    found = _query(run, f"with {_SAMPLES} select distinct name from samples")
    return set(found.name) - {UP, DURATION} if len(found) else set()


def growth(run: RunDirectory, wanted: Iterable[str], begin_ns: int, end_ns: int) -> pd.DataFrame:
    """By how much each series grew from one scrape to another: `name, labels` (a dict), `growth, resets`.

    `begin_ns` is the moment of a scrape: what a series shows then is where it begins. Buckets, which are most of the
    samples, are followed from scrape to scrape only where something else fell, since a restart resets all together.
    """
    names, span = sorted(wanted), {"begin": begin_ns, "end": end_ns}
    telling = [name for name in names if not name.endswith("_bucket")]
    fell = _query(run, f"{_STEPS} select count(*) as times from steps where fell", names=telling, **span)
    if len(fell) and fell.times[0]:
        head, figures = _STEPS, "sum(step) as growth, count(*) filter (fell) as resets from steps"
    else:
        begin = "coalesce(min(value) filter (ns = $begin), 0)"
        head, figures = _CHOSEN, f"max(value) - {begin} as growth, 0 as resets from chosen"
    rows = _query(run, f"{head} select name, {_SERIES}, {figures} group by name, labels order by name, series",
                  names=names, **span)  # fmt: skip
    return _with_labels(rows, ("growth", "resets"))


def growth_over_time(run: RunDirectory, wanted: Iterable[str], begin_ns: int, end_ns: int) -> pd.DataFrame:
    """The same between each two scrapes that follow each other: `ns` (of the later one), `name, labels, growth`."""
    rows = _query(
        run, f"{_STEPS} select ns, name, {_SERIES}, step as growth from steps order by ns, name, series",
        names=sorted(wanted), begin=begin_ns, end=end_ns,
    )  # fmt: skip
    return _with_labels(rows, ("ns", "growth"))


def readings(run: RunDirectory, wanted: Iterable[str], begin_ns: int, end_ns: int) -> pd.DataFrame:
    """What gauges showed: `ns, name, labels` (a dict), `value`, one row a scrape and series, in order of time."""
    rows = _query(
        run, f"{_CHOSEN} select ns, name, {_SERIES}, value from chosen order by ns, name, series",
        names=sorted(wanted), begin=begin_ns, end=end_ns,
    )  # fmt: skip
    return _with_labels(rows, ("ns", "value"))


def _with_labels(rows: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    if rows.empty:
        return pd.DataFrame({"name": [], "labels": []} | {column: [] for column in columns})
    labels = {series: json.loads(series) for series in rows.series.unique()}
    return rows.assign(labels=rows.series.map(labels))[[*columns, "name", "labels"]]


def _query(run: RunDirectory, sql: str, **parameters: object) -> pd.DataFrame:
    files = [str(path) for path in run.sources("scrapes")]
    if not files:
        return pd.DataFrame()
    import duckdb  # here: at the end of a process that has greenlets left, it prints what it could not free

    try:
        with duckdb.connect() as connection:
            return connection.sql(sql, params={"files": files, **parameters}).df()
    except duckdb.Error as error:
        raise RunDataError(f"{run.path}: table scrapes cannot be read: {error}") from None
