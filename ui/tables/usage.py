"""Usage records shaped for showing: sums by group, and tokens of each tenant over time."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import pandas as pd

from sojourn.metrics.usage.record import UsageRecord
from sojourn.metrics.usage.report import NOBODY, summed, total

OTHERS = "all others"
MOST_TENANTS = 7  # of a figure: there are so many colours
MOST_SPANS = 60
SPAN_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 86_400, 7 * 86_400)


def usage_sums(records: Sequence[UsageRecord], by: str) -> pd.DataFrame:
    """A row a group, and the total."""
    rows = [*summed(records, by), total(records)]
    table = pd.DataFrame({
        by: [row.group for row in rows],
        "calls": [f"{row.calls:,}" for row in rows],
        "answered": [f"{row.by_status.get('answered', 0):,}" for row in rows],
        "interrupted": [f"{row.by_status.get('interrupted', 0):,}" for row in rows],
        "prompt tokens": [f"{row.prompt_tokens:,}" for row in rows],
        "cached": [f"{row.cached_tokens:,}" for row in rows],
        "output tokens": [f"{row.output_tokens:,}" for row in rows],
        "device (s)": [None if row.device_ms is None else f"{row.device_ms / 1e3:,.3f}" for row in rows],
    })  # fmt: skip
    currency = rows[-1].currency
    if rows[-1].joules is not None:
        table["joules"] = [None if row.joules is None else f"{row.joules:,.1f}" for row in rows]
    if currency is not None:
        for name, column in (("by tokens", "price_of_tokens"), ("by device time", "price_of_device")):
            prices = [getattr(row, column) for row in rows]
            table[f"{currency} {name}"] = [None if price is None else f"{price:,.6f}" for price in prices]
    return table


def tokens_over_time(records: Sequence[UsageRecord]) -> tuple[pd.DataFrame, int]:
    """Prompt and output tokens by the time at which their calls arrived: a row a span, a column a tenant, the largest
    first; and the seconds of a span."""
    used = [record for record in records if record.prompt_tokens + record.output_tokens]
    if not used:
        return pd.DataFrame(), 0
    stamps = [record.time.timestamp() for record in used]
    length = max(stamps) - min(stamps)
    span = next((seconds for seconds in SPAN_SECONDS if length / seconds < MOST_SPANS), SPAN_SECONDS[-1])
    tokens = Counter()
    for record in used:
        tokens[record.tenant or NOBODY] += record.prompt_tokens + record.output_tokens
    shown = [tenant for tenant, _ in tokens.most_common(MOST_TENANTS)]
    frame = pd.DataFrame({
        "at": [datetime.fromtimestamp(stamp // span * span, UTC) for stamp in stamps],
        "tenant": [name if (name := record.tenant or NOBODY) in shown else OTHERS for record in used],
        "tokens": [record.prompt_tokens + record.output_tokens for record in used],
    })  # fmt: skip
    table = frame.pivot_table(index="at", columns="tenant", values="tokens", aggfunc="sum", fill_value=0)
    return table[[name for name in [*shown, OTHERS] if name in table.columns]], span
