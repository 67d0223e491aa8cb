"""LoRA adapters of a run, shaped for showing."""

import pandas as pd

from sojourn.metrics.request.waits import reasons
from sojourn.ui.text import duration, label, number

MOST_ADAPTERS = 50


def adapters(requests: pd.DataFrame) -> pd.DataFrame:
    """What the requests of each adapter met, as text, a row an adapter, the most used first; empty of a run without."""
    if "adapter" not in requests or not requests.adapter.notna().any():
        return pd.DataFrame()
    rows = []
    for name, own in requests[requests.adapter.notna()].groupby("adapter"):
        waited = [reasons(cell).get("adapter", 0) for cell in own.waits]
        rows.append(
            {
                "adapter": label(name, 40), "requests": len(own), "output tokens": _total(own, "output_tokens"),
                "loads into a slot": _total(own, "adapter_loads"),
                "reading, mean": _total(own, "ledger_memory_adapter_load_ns") / len(own),
                "reading, longest": float(own.ledger_memory_adapter_load_ns.max()),
                "wait for a slot, mean": sum(waited) / len(own), "wait for a slot, longest": float(max(waited)),
            }
        )  # fmt: skip
    table = pd.DataFrame(rows).sort_values("requests", ascending=False, kind="stable").head(MOST_ADAPTERS)
    for name in table.columns[1:]:
        is_time = "mean" in name or "longest" in name
        table[name] = table[name].map(duration if is_time else number)
    return table


def _total(requests: pd.DataFrame, name: str) -> float:
    column = f"server_{name}" if f"server_{name}" in requests else name
    return float(requests[column].fillna(0).sum())
