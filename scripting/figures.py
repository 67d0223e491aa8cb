"""The figures of the app, for notebooks: `run.figures.ledger()`, …. Needs the ui extra."""

from typing import TYPE_CHECKING

from sojourn.metrics.errors import SojournError
from sojourn.metrics.installed import need
from sojourn.metrics.request.objectives import OBJECTIVES

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from sojourn.ui.run_data import RunData


class Figures:
    """Plotly figures of one run. Raises SojournError where plotly is not installed, or the run lacks the records."""

    def __init__(self, data: "RunData"):
        self._data = data

    @classmethod
    def of(cls, path) -> "Figures":
        need("plotly", what="a figure")
        from sojourn.ui.run_data import load

        return cls(load(path))

    def ledger(self, until: str = "ledger") -> "go.Figure":
        """Mean time by account. `until`: "ledger", up to the last byte, or "ttft", up to the first text."""
        from sojourn.ui.figures.ledger import where_the_time_went

        return where_the_time_went(self._data.requests, until)

    def waterfall(self, count: int = 20) -> "go.Figure":
        """The ledger of the slowest requests, one bar each."""
        from sojourn.ui.figures.ledger import waterfall

        return waterfall(self._data.requests.nlargest(count, "e2e_ms"))

    def request(self, request_id: str) -> "go.Figure":
        """The time of one request: its accounts and, where recorded, its steps."""
        from sojourn.ui.figures.ledger import one_request

        rows = self._data.requests
        found = rows[rows.request_id == request_id]
        if found.empty:
            raise SojournError(f"the run has no measured request {request_id}")
        return one_request(found.iloc[0], self._data.steps)

    def attainment(self) -> "go.Figure":
        """Share of requests that met their objectives, by class."""
        from sojourn.ui.figures.goodput import attainment

        if self._data.diagnosis is None:
            raise SojournError(self._data.no_diagnosis)
        return attainment(self._data.diagnosis.goodput)

    def latency(self, name: str = "ttft_ms") -> "go.Figure":
        """Distribution of a latency by class, with the objectives. `name`: of OBJECTIVES, such as ttft_ms."""
        from sojourn.ui.figures.goodput import bounds, latency_distribution

        if name not in OBJECTIVES:
            raise SojournError(f"{name} is no latency; give {', '.join(OBJECTIVES)}")
        rows = self._data.requests
        return latency_distribution(rows, name, bounds(rows, self._data.meta.get("objectives") or [], name))

    def steps(self) -> "go.Figure":
        """Steps over time: step time, batch, tokens, queue."""
        from sojourn.ui.figures.steps import over_time

        if self._data.steps.empty:
            raise SojournError("no server recorded the steps of this run")
        return over_time(self._data.steps, self._data.begin_ns)
