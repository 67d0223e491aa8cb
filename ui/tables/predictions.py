"""The ledger of predictions, shaped for showing."""

import pandas as pd

from sojourn.metrics.prediction import change_text
from sojourn.replay.verdict.ledger import Checked, LedgerEntry, Score
from sojourn.ui.text import number, percent

SHARES = ("attainment",)  # figures that are shares


def tiles(found: Score) -> list[tuple[str, str, str, str]]:
    """How good the predictions were, as tiles."""
    worst = f"worst {points(found.worst_error)}"
    return [
        ("predictions", f"{found.predictions:,}", "verified", "each pair of runs and change once"),
        ("hits", percent(found.hit_rate), "", f"{found.hits:,} of {found.predictions:,} within the 80% interval"),
        ("mean error", points(found.mean_error), "", worst),
    ]


def points(share: float | None) -> str:
    """A difference of shares in percentage points."""
    return "–" if share is None else f"{number(100 * share)} points"


def pair_name(entry: LedgerEntry) -> str:
    return f"{entry.run} → {entry.run2}: {change_text(entry.change)} ({entry.outcome})"


def is_share(figure: Checked) -> bool:
    return figure.name.split(":")[0] in SHARES


def shown(figure: Checked, value: float | None) -> str:
    return percent(value) if is_share(figure) else number(value)


def figure_name(figure: Checked) -> str:
    """`ttft_ms:p50` → `TTFT p50 (ms)`."""
    name, _, quantile = figure.name.partition(":")
    if name == "goodput_rps":
        return "goodput (1/s)"
    return f"{name.removesuffix('_ms').upper()} {quantile} (ms)" if name.endswith("_ms") else name


def compared(entry: LedgerEntry) -> pd.DataFrame:
    """One row per figure: before, predicted with its interval, measured, and whether it was a hit. The last one is
    predicted for the speed that the second run had."""
    again = [] if entry.at_speed is None else [entry.at_speed]
    figures = [*entry.figures, *again]
    return pd.DataFrame(
        {
            "figure": [
                *(figure_name(figure) for figure in entry.figures),
                *(f"{figure_name(figure)}, at the second run's speed" for figure in again),
            ],
            "before": [shown(figure, figure.before) for figure in figures],
            "predicted": [shown(figure, figure.median) for figure in figures],
            "interval": [f"{shown(figure, figure.low)} to {shown(figure, figure.high)}" for figure in figures],
            "measured": [shown(figure, figure.measured) for figure in figures],
            "difference": [points(figure.error) if is_share(figure) else percent(figure.error) for figure in figures],
            "result": ["hit" if figure.hit else "miss" for figure in figures],
        }
    )
