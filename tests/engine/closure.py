"""Whether the books of a recorded run close, read as exact integers."""

from pathlib import Path

from sojourn.metrics.ledger import SERVER_ACCOUNTS, closes
from sojourn.metrics.records import STAGES
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server_process import wait_for


def table(folder: Path, name: str) -> list[dict]:
    """What was recorded so far."""
    return RunDirectory(folder).arrow(name).to_pylist()


def rows_of(folder: Path, names: list[str], timeout_s: float = 20) -> list[dict]:
    """The records of these requests, in this order, once they are written."""
    found: dict[str, dict] = {}

    def written() -> bool:
        found.update({row["request_id"]: row for row in table(folder, "requests")})
        return all(name in found for name in names)

    wait_for(written, timeout_s)
    return [found[name] for name in names]


def open_books(row: dict) -> list[str]:
    """What does not close in a request's record; empty if all does."""
    end_ns = row["written_ns"] or row["finished_ns"]
    latency_ns, found = end_ns - row["arrived_ns"], []
    for books, until_ns in (("ledger", end_ns), ("ttft", row["first_written_ns"])):
        booked = {info.name: row[f"{books}_{info.column}"] for info in SERVER_ACCOUNTS}
        left_ns = until_ns - row["arrived_ns"] - sum(booked.values()) if until_ns is not None else 0
        if not closes(left_ns, latency_ns):
            found.append(f"{books}: {left_ns} ns of {latency_ns} have no account; the others have {booked}")
        found += [f"{books}: {name} has {ns} ns" for name, ns in booked.items() if ns < 0]
    if len(row["token_ns"]) != row["output_tokens"] or row["token_ns"] != sorted(row["token_ns"]):
        found.append(f"{row['output_tokens']} tokens, at {row['token_ns']}")
    return [f"{row['request_id']}: {fault}" for fault in found]


def open_steps(steps: list[dict]) -> list[str]:
    """What does not close in the steps of one core's life."""
    found = []
    for step in steps:
        left_ns = step["end_ns"] - step["begin_ns"] - sum(step[f"stage_{stage}_ns"] for stage in STAGES)
        if left_ns:
            found.append(f"step {step['step']}: {left_ns} ns are in no stage")
    pools = {sum(step[f"blocks_{state}"] for state in ("free", "active", "reusable")) for step in steps}
    if len(pools) > 1:
        found.append(f"the pool has {sorted(pools)} blocks")
    return found
