"""Two runs side by side, shaped for showing: small tables as text."""

import pandas as pd

from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.sides import AccountDifference, ClassComparison, LedgerDifference
from sojourn.metrics.compare.verdict import Compared, Comparison
from sojourn.metrics.request.goodput import ClassGoodput
from sojourn.ui.text import NOTHING, number, percent

MEANING = {
    "no worse": "B is no worse than A, within the margin, by every metric below.",
    "worse": "B is worse than A by more than the margin.",
    "cannot tell": "The runs cannot tell whether B is worse than A by more than the margin.",
}
MOST_ROWS = 20


def signed(value: float | None) -> str:
    text = number(value)
    return f"+{text}" if value is not None and value > 0 and text not in ("0", NOTHING) else text


def ledger_rows(found: LedgerDifference) -> pd.DataFrame:
    """Account by account: both means, B − A with its interval, and the ratio."""
    rows = []
    for row in found.rows:
        interval = NOTHING if row.low_ms is None else f"{signed(row.low_ms)} to {signed(row.high_ms)}"
        rows.append({
            "account": row.account, "A (ms)": number(row.a_ms), "B (ms)": number(row.b_ms),
            "B − A (ms)": signed(row.difference_ms), "95% interval": interval, "differs": _differs(row),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _differs(row: AccountDifference) -> str:
    if row.low_ms is None or row.high_ms is None:
        return "not known"
    return "more" if row.low_ms > 0 else "less" if row.high_ms < 0 else "no"


def metric_rows(found: list[Compared], confidence: float = 0.95) -> pd.DataFrame:
    rows = []
    for each in found:
        bounds = NOTHING if each.low is None else f"{each.low:.3f} to {each.high:.3f}"
        rows.append({
            "metric": each.metric, "A": _value(each.metric, each.a), "B": _value(each.metric, each.b),
            "B / A": NOTHING if each.ratio is None else f"{each.ratio:.3f}", f"bounds at {percent(confidence)}": bounds,
            "verdict": "better" if each.better else each.verdict, "why": _why(each),
        })  # fmt: skip
    table = pd.DataFrame(rows)
    return table.drop(columns="why") if len(table) and not table.why.any() else table


def class_rows(found: list[ClassComparison]) -> pd.DataFrame:
    """Latencies and attainment by class."""
    parts = []
    for group in found:
        table = metric_rows(group.metrics).drop(columns="why", errors="ignore")
        table.insert(0, "class", group.klass or "(none)")
        parts.append(table)
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def goodput_rows(a: list[ClassGoodput], b: list[ClassGoodput]) -> pd.DataFrame:
    """Good requests per second and their share, by class, each with its 95% interval."""
    other = {group.klass: group for group in b}
    rows = []
    for group in a:
        for side, each in (("A", group), ("B", other.get(group.klass))):
            rows.append({
                "class": group.klass or "(none)", "run": side,
                "good req/s": NOTHING if each is None else _rate(each),
                "attainment": NOTHING if each is None else _attainment(each),
                "sent": NOTHING if each is None else f"{each.sent:,}",
            })  # fmt: skip
    return pd.DataFrame(rows)


def pair_rows(pairs: pd.DataFrame, count: int = MOST_ROWS) -> pd.DataFrame:
    """The requests whose end-to-end latency differs most, as text: what a reader sees of both in `A → B`."""
    gap = pairs.e2e_ms_b - pairs.e2e_ms_a
    rows = pairs.assign(gap=gap).loc[gap.abs().sort_values(ascending=False, kind="stable").index[:count]]
    return pd.DataFrame({
        "A": rows.request_a, "B": rows.request_b, "class": rows.klass, "due (s)": rows.due_s.map(number),
        "TTFT (ms)": _both(rows.ttft_ms_a, rows.ttft_ms_b), "E2E (ms)": _both(rows.e2e_ms_a, rows.e2e_ms_b),
        "B − A (ms)": rows.gap.map(signed), "largest change": rows.account, "of it (ms)": rows.account_ms.map(signed),
        "status": [a if a == b else f"{a} → {b}" for a, b in zip(rows.status_a, rows.status_b, strict=True)],
    })  # fmt: skip


def _both(a: pd.Series, b: pd.Series) -> list[str]:
    return [f"{number(one)} → {number(other)}" for one, other in zip(a, b, strict=True)]


def fold(notes: Comparison) -> list[str]:
    """The notes of a comparison as sentences."""
    return [f"{note[0].upper()}{note[1:]}." for note in notes.notes]


def _value(metric: str, value: float | None) -> str:
    if metric in ("attainment", "served", "steady_steps"):
        return percent(value)
    return number(value, "ms") if METRICS[metric].what.endswith("_ms") else number(value)


def _why(each: Compared) -> str:
    if each.needs is None:
        return each.reason
    more = f"{max(each.needs, 1.2):,.3g} times as many requests would decide it"
    return f"{each.reason}; {more}" if each.reason else more


def _attainment(group: ClassGoodput) -> str:
    found = group.attainment_interval
    spread = "" if found is None or found.low is None or found.high is None else (
        f" ({percent(found.low)}–{percent(found.high)})"
    )  # fmt: skip
    return f"{percent(group.attainment)}{spread}"


def _rate(group: ClassGoodput) -> str:
    """The interval is that of the share, at the rate at which requests were sent."""
    found, due = group.attainment_interval, group.sent / group.window.seconds if group.window else None
    if found is None or due is None or found.low is None or found.high is None:
        return number(group.goodput_rps)
    return f"{number(group.goodput_rps)} ({number(found.low * due)}–{number(found.high * due)})"
