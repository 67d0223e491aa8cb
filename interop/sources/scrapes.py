"""The scrapes of a run as series: by how much each grew over a span of time, and what each gauge showed.

Differences are those of `interop.sources.counters`, as DuckDB takes them of many scrapes at once. What a counter had
gained between the last scrape and a restart is lost. A gauge is known at the moments of the scrapes only. Names are
those that the sources know, whatever prefix the page has.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

from sojourn.interop.sources.counters import Look, Series, alternates, begins_at_zero, identity, tells_restart
from sojourn.interop.sources.names import canonical
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory

# Written beside the server's samples, as Prometheus names them: did the scrape succeed, and how long did it take?
UP, DURATION = "up", "scrape_duration_seconds"
STARTED = "process_start_time_seconds"  # of prometheus_client: when the process behind a page began
OPEN_FILES = "process_open_fds"  # of prometheus_client: with each connection that stays open there is one more

_SERIES = "cast(to_json(labels) as varchar) as series"
_SAMPLES = "samples as (select * from read_parquet($files, union_by_name=true))"
_CHOSEN = f"""with {_SAMPLES}, chosen as (
    select * from samples where list_contains($names, name) and isfinite(value) and ns between $begin and $end
)"""
# From the first scrape on: a series that is missing at the beginning of a span goes on where it was before.
_STEPS = f"""with {_SAMPLES}, ordered as (
    select *, lag(value) over (partition by name, labels order by ns) as before
    from samples where list_contains($names, name) and isfinite(value) and ns <= $end
), steps as (
    select ns, name, labels, value, before, coalesce(value < before, false) as fell, case
        when before is null then 0
        when value < before then value
        else value - before end as step
    from ordered where ns > $begin
)"""


@dataclass(frozen=True, slots=True)
class ScrapeSummary:
    """How the scraping of a run went. Times are nanoseconds of the monotonic clock of the host that scraped."""

    answered_ns: np.ndarray  # [answered] in order of time
    failed: int
    slowest_s: float | None  # None where no scrape has its duration
    restarts: int  # times that the server began anew, as its counters or its process tell
    alternates: bool = False  # several processes answered in turn

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


def answers(run: RunDirectory) -> pd.DataFrame:
    """Each scrape that was answered, `ns` and `took_s`, in order of time; `took_s` is NaN where nobody timed it."""
    rows = _query(
        run,
        f"with {_SAMPLES} select ns, max(value) filter (name = '{DURATION}') as took_s, "
        f"min(value) filter (name = '{UP}') as up from samples group by ns order by ns",
    )
    if rows.empty:
        return pd.DataFrame({"ns": [], "took_s": []})
    return rows[rows.up.isna() | (rows.up > 0)][["ns", "took_s"]].reset_index(drop=True)


def names(run: RunDirectory) -> set[str]:
    """The names of all samples that the server gave, as the sources know them."""
    return {canonical(name) for name in _written(run)} - {UP, DURATION}


def growth(run: RunDirectory, wanted: Iterable[str], begin_ns: int, end_ns: int) -> pd.DataFrame:
    """By how much each series grew from one scrape to another: `name, labels` (a dict), `growth, resets`.

    `begin_ns` is the moment of a scrape: what a series shows then is where it begins. Buckets, which are most of the
    samples, are followed from scrape to scrape only where something else fell or was missing: all share that.
    """
    names, span = _names(run, wanted), {"begin": begin_ns, "end": end_ns}
    telling = [name for name in names if tells_restart(name)]
    uneven = _query(
        run,
        f"{_STEPS}, series as (select count(*) as seen, bool_or(fell) as fell from steps group by name, labels) "
        "select count(distinct seen) > 1 or bool_or(fell) as uneven from series",
        names=telling, **span,
    )  # fmt: skip
    if len(uneven) and uneven.uneven[0] is not False:
        head, figures = _STEPS, "sum(step) as growth, count(*) filter (fell) as resets from steps"
    else:
        begin = "coalesce(min(value) filter (ns = $begin), min(value))"
        head, figures = _CHOSEN, f"max(value) - {begin} as growth, 0 as resets from chosen"
    rows = _query(run, f"{head} select name, {_SERIES}, {figures} group by name, labels order by name, series",
                  names=names, **span)  # fmt: skip
    found = _with_labels(rows, ("growth", "resets"))
    if len(found):
        first = {(name, series): value for _, name, series, value in _first_events(run, names, begin_ns, end_ns)}
        found["growth"] += [first.get(each, 0.0) for each in zip(rows.name, rows.series, strict=True)]
    return found


def growth_over_time(run: RunDirectory, wanted: Iterable[str], begin_ns: int, end_ns: int) -> pd.DataFrame:
    """The same between each two scrapes that follow each other: `ns` (of the later one), `name, labels, growth`."""
    names = _names(run, wanted)
    rows = _query(
        run, f"{_STEPS} select ns, name, {_SERIES}, step as growth from steps order by ns, name, series",
        names=names, begin=begin_ns, end=end_ns,
    )  # fmt: skip
    found = _with_labels(rows, ("ns", "growth"))
    if len(found):
        first = {(ns, name, series): value for ns, name, series, value in _first_events(run, names, begin_ns, end_ns)}
        found["growth"] += [first.get(each, 0.0) for each in zip(rows.ns, rows.name, rows.series, strict=True)]
    return found


def alternate(run: RunDirectory, wanted: Iterable[str]) -> bool:
    """Whether several processes answered the scrapes of a run in turn, so that their sums mean nothing."""
    telling = [name for name in _names(run, wanted) if tells_restart(name)]
    last = 2**63 - 1
    started = _query(
        run, f"with {_SAMPLES} select ns, min(value) as started from samples where name = '{STARTED}' "
        "and isfinite(value) group by ns having count(*) = 1",
    )  # fmt: skip
    began = dict(zip(started.ns, started.started, strict=True)) if len(started) else {}
    only = "where fell" if len(set(began.values())) < 2 else ""
    rows = _query(
        run, f"{_STEPS}, falling as (select distinct name, labels from steps {only}) "
        f"select ns, name, {_SERIES}, value, before, fell from steps join falling using (name, labels)",
        names=telling, begin=-1, end=last,
    )  # fmt: skip
    values: dict[int, dict[Series, float]] = {}
    fell: dict[int, dict[Series, float]] = {}
    for row in rows.itertuples(index=False, name="Row"):
        series = (row.name, ((row.series, ""),))
        values.setdefault(row.ns, {})[series] = row.value
        if row.fell:
            fell.setdefault(row.ns, {})[series] = row.before
    return alternates([
        Look(ns, began.get(ns), fell.get(ns, {}), values.get(ns, {})) for ns in scrape_summary(run).answered_ns.tolist()
    ])  # fmt: skip


def _written(run: RunDirectory) -> list[str]:
    found = _query(run, f"with {_SAMPLES} select distinct name from samples order by name")
    return list(found.name) if len(found) else []


def _names(run: RunDirectory, wanted: Iterable[str]) -> list[str]:
    """The names as the page writes them."""
    chosen = frozenset(wanted)
    return [name for name in _written(run) if canonical(name) in chosen]


def _first_events(run: RunDirectory, names: list[str], begin_ns: int, end_ns: int) -> list[tuple[int, str, str, float]]:
    """Of the series that appear in a span and began at 0: moment, name, labels, and what they showed first."""
    firsts = _query(
        run, f"with {_SAMPLES} select name, {_SERIES}, min(ns) as ns, arg_min(value, ns) as value from samples "
        "where ns <= $end group by name, labels order by ns", end=end_ns,
    )  # fmt: skip
    chosen, known, found = frozenset(names), set(), []
    for _, group in firsts.groupby("ns", sort=True):
        new = set()
        for row in group.itertuples(index=False, name="Row"):
            of = identity(_pairs(json.loads(row.series)))
            if row.name in chosen and row.ns > begin_ns and np.isfinite(row.value) and begins_at_zero(of, known):
                found.append((int(row.ns), row.name, row.series, float(row.value)))
            if row.name not in (UP, DURATION):
                new.add(of)
        known |= new
    return [each for each in found if each[0] > int(firsts.ns.min())]


def _pairs(labels: object) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in dict(labels).items()]


def readings(run: RunDirectory, wanted: Iterable[str], begin_ns: int, end_ns: int) -> pd.DataFrame:
    """What gauges showed: `ns, name, labels` (a dict), `value`, one row a scrape and series, in order of time."""
    rows = _query(
        run, f"{_CHOSEN} select ns, name, {_SERIES}, value from chosen order by ns, name, series",
        names=_names(run, wanted), begin=begin_ns, end=end_ns,
    )  # fmt: skip
    return _with_labels(rows, ("ns", "value"))


def _with_labels(rows: pd.DataFrame, columns: tuple[str, ...]) -> pd.DataFrame:
    if rows.empty:
        return pd.DataFrame({"name": [], "labels": []} | {column: [] for column in columns})
    labels = {series: json.loads(series) for series in rows.series.unique()}
    return rows.assign(labels=rows.series.map(labels), name=rows.name.map(canonical))[[*columns, "name", "labels"]]


@cache
def _database():
    """Of this process: it takes longer to make one than to answer a query."""
    import duckdb

    return duckdb.connect()


def _query(run: RunDirectory, sql: str, **parameters: object) -> pd.DataFrame:
    files = [str(path) for path in run.sources("scrapes")]
    if not files:
        return pd.DataFrame()
    import duckdb  # here: at the end of a process that has greenlets left, it prints what it could not free

    try:
        with _database().cursor() as connection:
            return connection.sql(sql, params={"files": files, **parameters}).df()
    except duckdb.Error as error:
        raise RunDataError(f"{run.path}: table scrapes cannot be read: {error}") from None
