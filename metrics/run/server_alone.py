"""A run that a server recorded alone: no client measured it, so the server's own stamps stand in for a client's."""

from typing import TYPE_CHECKING, Any

import numpy as np

from sojourn.metrics.run.directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd

# The reason in run.json by which such a run is known.
SERVER_ALONE = "recorded by a server alone: no client measured it"
CLIENT_LEFT = "the client left"  # what such a run says of a request whose client went away before its end
MARK = (
    "no client measured this run: latencies are the server's own, from a request's arrival to its last write; the load "
    "generator, the network and waits in its socket are not in them"
)


def is_server_alone(run: RunDirectory, meta: dict[str, Any]) -> bool:
    """Whether only a server recorded this run, and some request of it."""
    by_itself = SERVER_ALONE in (meta.get("invalid_reasons") or ())
    return by_itself and not run.sources("client") and bool(run.sources("requests"))


def requests_of(run: RunDirectory, meta: dict[str, Any]) -> "pd.DataFrame":
    """`RunDirectory.requests()`; of a run that a server recorded alone, with its stamps in place of the client's."""
    if not is_server_alone(run, meta):
        return run.requests()
    return run.requests(client=as_client(run.table("requests"), run.table("client")))


def meta_of(run: RunDirectory) -> dict[str, Any]:
    """`run.json`, in which a run is not invalid for the only reason that no client measured it."""
    meta = run.meta()
    if not is_server_alone(run, meta):
        return meta
    other = [reason for reason in meta["invalid_reasons"] if reason != SERVER_ALONE]
    return meta | {"measured_by": "server", "valid": False if other else None, "invalid_reasons": other}


def as_client(served: "pd.DataFrame", empty: "pd.DataFrame") -> "pd.DataFrame":
    """The `client` table as a client beside the server would have seen it at best; `empty` has its columns."""
    served = served.drop_duplicates("request_id", keep="last")
    failed = served.error.notna() & (served.error != "")
    left = served.finish_reason == "abort"
    first_written = served.first_written_ns.astype(object).where(served.first_written_ns.notna(), None)
    columns = {
        "request_id": served.request_id,
        "scenario": "",
        "due_ns": served.arrived_ns,
        "sent_ns": served.arrived_ns,
        "status": np.select([failed, left], ["error", "cancelled"], "ok"),
        "error": served.error.mask(left & ~failed, CLIENT_LEFT),
        "first_token_ns": served.first_written_ns,
        "last_byte_ns": served.written_ns.where(served.written_ns.notna(), served.finished_ns),
        "chunk_ns": [_written(*stamps) for stamps in zip(served.token_ns, first_written, strict=True)],
        "chunk_tokens": [[] for _ in range(len(served))],  # unknown: one each
        "last_token_ns": None,  # that of `chunk_ns`
        "session_id": "",
        "turn": 0,
    }
    for name in ("tenant", "klass", "prompt_tokens", "cached_tokens", "output_tokens"):
        columns[name] = served[name]
    import pandas as pd  # the server's front imports this module, and need not wait for pandas

    result = pd.DataFrame(columns, index=served.index)
    return result.reindex(columns=empty.columns)


def _written(token_ns: Any, first_written_ns: Any) -> list[int]:
    """When each token could be read at the earliest: as it left the loop, and none before the first write."""
    if token_ns is None or not len(token_ns) or first_written_ns is None:
        return []
    return np.maximum(np.asarray(token_ns, dtype="int64"), int(first_written_ns)).tolist()
