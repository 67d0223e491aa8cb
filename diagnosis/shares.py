"""How the time of a run divides: by account, by lifecycle, and how far the accounts close."""

import pandas as pd

from sojourn.diagnosis.verdict import Closure
from sojourn.metrics.ledger import ACCOUNTS, LIFECYCLES, UNACCOUNTED, closes


def ledger_columns(rows: pd.DataFrame, prefix: str = "ledger") -> pd.DataFrame:
    """The accounts of each request in milliseconds, by account name. `prefix`: ledger (to the last byte) or ttft."""
    columns = {f"{prefix}_{info.column}": info.name for info in ACCOUNTS}
    return rows[list(columns)].astype("float64").rename(columns=columns) / 1e6


def shares(rows: pd.DataFrame, prefix: str = "ledger") -> dict[str, float]:
    """Account → share of the time of all served requests, with what is unaccounted; sums to 1. Empty if none served.

    Of a request that no server recorded, all but the client's own accounts is unaccounted.
    """
    end, left = ("last_byte_ns", "unaccounted_ns") if prefix == "ledger" else ("first_token_ns", "ttft_unaccounted_ns")
    served = rows[(rows.status == "ok") & rows[end].notna()]
    latency_ms = (served[end].astype("float64") - served.due_ns.astype("float64")) / 1e6
    whole_ms = float(latency_ms.sum())
    if whole_ms <= 0:
        return {}
    booked = ledger_columns(served, prefix)
    unbooked_ms = latency_ms - booked.sum(axis=1)
    left_ms = (served[left].astype("float64") / 1e6).fillna(unbooked_ms)
    result = {name: float(ms) / whole_ms for name, ms in booked.sum().items()}
    return result | {UNACCOUNTED: float(left_ms.sum()) / whole_ms}


def by_lifecycle(account_shares: dict[str, float]) -> dict[str, float]:
    """Shares of the four lifecycles and of the client. What is unaccounted belongs to none."""
    result = dict.fromkeys((*LIFECYCLES, "client"), 0.0)
    for info in ACCOUNTS:
        result[info.lifecycle] += account_shares.get(info.name, 0.0)
    return result


def closure(rows: pd.DataFrame) -> Closure:
    """How well the accounts sum to the latency of the requests that client and server both recorded."""
    joined = rows[(rows.status == "ok") & rows.unaccounted_ns.notna()]
    latency = joined.last_byte_ns.astype("float64") - joined.due_ns.astype("float64")
    left = joined.unaccounted_ns.astype("float64").abs()
    share = left / latency.where(latency > 0)
    return Closure(
        joined=len(joined),
        closed=sum(closes(int(ns), int(total)) for ns, total in zip(left, latency, strict=True)),
        worst_share=float(share.max()) if len(joined) else None,
        worst_ns=float(left.max()) if len(joined) else None,
    )
