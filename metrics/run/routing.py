"""The time that a router takes before a request is at its server.

The router itself records nothing for us. Client and server share the clock of one host, so the way from the client's
send to the server's socket is measured as a whole: the router's choice, its questions to servers, its tries, and the
wires on both sides of it. On loopback wires take a tenth of a millisecond. Where the router and the servers run on
other hosts, nobody knows which part was the network, and the time stays in `client.network`.
"""

from typing import TYPE_CHECKING, Any

from sojourn.metrics.ledger import ACCOUNT_BY_NAME
from sojourn.metrics.run.front_turns import FROM

if TYPE_CHECKING:
    import pandas as pd

TO = ACCOUNT_BY_NAME["request.routing"].column
NOT_SEEN = "client, router and servers ran on several hosts: request.routing is not seen, and lies in client.network"


def with_routing(joined: "pd.DataFrame", meta: dict[str, Any]) -> "pd.DataFrame":
    """Moves the way in from `client.network` to `request.routing`, but for the turns of the front's loop, which
    `with_front_turns` has moved already. The sum of the accounts stays. Only for a router on this host."""
    router = meta.get("router")
    if not isinstance(router, dict) or not router.get("same_host"):
        return joined
    arrived, sent = (joined[name].astype("float64") for name in ("arrived_ns", "sent_ns"))
    moved = (arrived - sent - joined.front_turns_ns).clip(lower=0).fillna(0.0)
    for prefix in ("ledger", "ttft"):
        for column, sign in ((FROM, -1), (TO, 1)):
            name = f"{prefix}_{column}"
            joined[name] = joined[name].astype("float64") + sign * moved
    return joined


def routing_remark(meta: dict[str, Any]) -> str:
    """What to say wherever `request.routing` is shown; "" where it is measured, or where there was no router."""
    router = meta.get("router")
    return NOT_SEEN if isinstance(router, dict) and not router.get("same_host") else ""
