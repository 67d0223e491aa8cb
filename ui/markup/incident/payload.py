"""What the page knows of each request and step: columns of a run as JSON, times in ms from the begin of the run."""

from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.ledger import UNACCOUNTED
from sojourn.metrics.request.blame import matrix
from sojourn.metrics.request.goodput import judged, rate_window
from sojourn.metrics.request.objectives import OBJECTIVES, objectives_of
from sojourn.metrics.results.load import declared_window_s
from sojourn.metrics.run.directory import kept_share
from sojourn.ui.run_data import RunData
from sojourn.ui.tables.request import accounts_ms, classes, client_spans_ms, tokens_by_kind
from sojourn.ui.theme import ACCOUNT_COLOURS, COHORT_COLOURS, COLOURS, DARK

MOST_REQUESTS = 50_000  # a page with more would be larger than 20 MB
MOST_STEPS = 20_000  # more are summed by stretches of steps
SPAN_COLOURS = {"client.lag": ACCOUNT_COLOURS["client.lag"], "until the first token": COLOURS["request"],
                "after the first token": COLOURS["compute"]}  # fmt: skip


def payload(run: RunData) -> dict[str, Any]:
    """JSON of a run with at most MOST_REQUESTS requests. Names of requests and classes are as they were sent."""
    objectives = run.meta.get("objectives") or []
    rows = judged(run.requests, objectives).sort_values("due_ns", ignore_index=True)
    names = classes(rows)
    colours_of_classes = [COHORT_COLOURS[place % len(COHORT_COLOURS)] for place in range(len(names))]
    unknown = pd.Series(np.nan, index=rows.index)
    ledger, colours = _ledger(rows, run.has_ledger)
    groups, blamed = _blame(run, rows)
    return {
        "name": run.name,
        "classes": names,
        "colours": colours_of_classes,
        "dark_colours": [DARK.get(colour, colour) for colour in colours_of_classes],
        "objectives": [objectives_of(name, objectives) for name in names],
        "window_s": rate_window(rows, declared_window_s(run.meta), kept_share(run.meta)).sampled_seconds,
        "id": rows.request_id.tolist(),
        "klass": [names.index(str(name)) for name in rows.klass.fillna("")],
        "status": rows.status.fillna("missing").tolist(),
        "tokens": _numbers(rows.output_tokens, 0),
        "due": _moments(rows.due_ns, run.begin_ns),
        "first": _moments(rows.first_token_ns, run.begin_ns),
        "end": _moments(rows.last_byte_ns, run.begin_ns),
        **{name: _numbers(rows.get(name, unknown), 4) for name in OBJECTIVES},
        "accounts": list(ledger.columns),
        "account_colours": [colours[name] for name in ledger.columns],
        "ledger": [_numbers(ledger[name], 2) for name in ledger.columns],
        "groups": groups,
        "blame": blamed,
        "steps": _steps(run),
    }


def _moments(stamps: pd.Series, begin_ns: float) -> list[float | None]:
    return _numbers((stamps.astype("float64") - begin_ns) / 1e6, 2)


def _numbers(values: pd.Series, decimals: int) -> list[float | int | None]:
    """None for what is not known. Whole numbers without a point: they are shorter."""
    rounded = np.round(values.astype("float64").to_numpy(dtype="float64", na_value=np.nan), decimals)
    return [None if np.isnan(value) else int(value) if value == int(value) else value for value in rounded.tolist()]


def _ledger(rows: pd.DataFrame, has_ledger: bool) -> tuple[pd.DataFrame, dict[str, str]]:
    """Milliseconds by account, NaN for a request without a ledger; of a foreign server the client's own spans."""
    found = accounts_ms(rows) if has_ledger else client_spans_ms(rows)
    found = found.loc[:, [name for name in found if name == UNACCOUNTED or found[name].abs().sum() > 0]]
    return found.reindex(rows.index), ACCOUNT_COLOURS if has_ledger else SPAN_COLOURS


def _blame(run: RunData, rows: pd.DataFrame) -> tuple[list[str], list[list]]:
    """Groups of requests, and for each the ms by which it delayed each request; [] without records of steps."""
    if run.book is None:
        return [], []
    of_class = rows.set_index("request_id").klass.fillna("").astype(str)
    delays = matrix(run.book, of_class).reindex(rows.request_id) / 1e6
    return [str(name) for name in delays.columns], [_numbers(delays[name], 1) for name in delays.columns]


def _steps(run: RunData) -> dict[str, list]:
    """Begin, length and tokens of each step, or of stretches of steps."""
    steps = run.steps
    if steps.empty:
        return {"begin": [], "ms": [], "prompt": [], "decode": []}
    tokens = tokens_by_kind(steps)
    prompt = (tokens.sum(axis=1) - tokens.decode).to_numpy()
    columns = {
        "ms": (steps.end_ns - steps.begin_ns).to_numpy() / 1e6,
        "prompt": prompt,
        "decode": tokens.decode.to_numpy(),
    }
    edges = np.arange(0, len(steps), max(1, -(-len(steps) // MOST_STEPS)))
    return {
        "begin": _moments(steps.begin_ns.iloc[edges], run.begin_ns),
        **{name: _numbers(pd.Series(np.add.reduceat(values, edges)), 2) for name, values in columns.items()},
    }
