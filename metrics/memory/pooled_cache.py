"""What a fleet's routing cost in prefix hits: each prompt on the server that it went to, against the best server.

A server without eviction holds all blocks that it ever computed. Its record of a request has the chain hashes of the
blocks of the prompt and of the output, which are the same on every server. So the requests of all servers, in order of
time, tell which server held how much of a prompt when the prompt got its first place. A chain is on one server as a
whole: what the best server holds is what one cache of all servers would hold.

Measures: the tokens that eviction cost on the chosen server (`evicted_tokens`), and those that the choice of the server
cost (`lost_tokens`); both and the hits sum to the hits of the pooled infinite cache.
Cannot measure: evictions on the servers that were not chosen. A small cache may have lost there what is counted as lost
by routing. A prompt's blocks count as held from its first token on, so chunks of a prompt count late.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.memory.prefix_outcomes import hit_tokens

COLUMNS = ("prompt_block_hashes", "output_block_hashes")
SHOWN = ("request_id", "server", "ns", "prompt_tokens", "hit_tokens", "own_tokens", "best_tokens", "best_server")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prompt tokens of the requests of one server, or of all servers."""

    server: str
    requests: int
    prompt_tokens: int
    hit_tokens: int  # that were not computed
    own_tokens: int  # that the same server would have hit without eviction
    best_tokens: int  # that the best server would have hit without eviction: the pooled infinite cache
    prefill_ns_per_token: float  # of a computed prompt token, mean; NaN where none was computed

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(self.prompt_tokens, 1)

    @property
    def pooled_rate(self) -> float:
        """Hit rate of the pooled infinite cache, on the same requests."""
        return self.best_tokens / max(self.prompt_tokens, 1)

    @property
    def evicted_tokens(self) -> int:
        """What eviction, or a cache that is off, cost on the server that was chosen."""
        return self.own_tokens - self.hit_tokens

    @property
    def lost_tokens(self) -> int:
        """What the choice of the server cost."""
        return self.best_tokens - self.own_tokens

    @property
    def lost_share(self) -> float:
        """Of the prompt tokens."""
        return self.lost_tokens / max(self.prompt_tokens, 1)

    @property
    def lost_ns(self) -> float:
        """Estimated time of prefill for the lost tokens."""
        return self.lost_tokens * self.prefill_ns_per_token


@dataclass(frozen=True, slots=True)
class PooledCache:
    """A fleet's prefix caches as one. `requests` has a row a request, in order of their lookups, with SHOWN and
    `evicted_tokens`, `lost_tokens`; `ns` is the moment of its first place."""

    servers: tuple[CacheUse, ...]  # in order of their names
    fleet: CacheUse
    requests: pd.DataFrame


def pooled_cache(served: pd.DataFrame, block_size: int, counted: Collection[str] | None = None) -> PooledCache | None:
    """Of `requests.parquet` of a fleet, with all requests that any server had, the warm-up included.

    `counted` are the ids of the requests that count; all do where it is None. None where the servers recorded no block
    hashes, or no request counts.
    """
    if not {*COLUMNS, "server"} <= set(served.columns):
        return None
    rows = served[served.prompt_block_hashes.notna() & served.scheduled_ns.notna() & served.server.notna()]
    names = sorted(rows.server.unique())
    place = {name: number for number, name in enumerate(names)}
    held: dict[int, int] = {}  # block → servers that hold it, one bit each
    found = []
    for _, lookup, row in sorted(_events(rows), key=lambda event: event[:2]):
        if not lookup:
            for block in row["blocks"]:
                held[block] = held.get(block, 0) | 1 << place[row["server"]]
        elif counted is None or row["request_id"] in counted:
            found.append(_lookup(row, held, names, block_size))
    if not found:
        return None
    table = pd.DataFrame(found)
    table["evicted_tokens"] = table.own_tokens - table.hit_tokens
    table["lost_tokens"] = table.best_tokens - table.own_tokens
    costs = table.pop("prefill_ns")
    uses = [_use(name, table[table.server == name], costs) for name in names if (table.server == name).any()]
    return PooledCache(tuple(uses), _use("fleet", table, costs), table)


def _events(rows: pd.DataFrame) -> Iterator[tuple[int, bool, dict]]:
    """(ns, whether it is a lookup, what) of each row: it looks for its prompt, then it has computed it, and then its
    output. What is computed at a moment is found at that moment."""
    for row in rows.to_dict("records"):
        prompt, output = (_list(row[column]) for column in COLUMNS)
        tokens = _list(row["token_ns"])
        end_ns = int(row["finished_ns"])
        row["prompt"] = prompt
        yield int(row["scheduled_ns"]), True, row
        whole = row["finish_reason"] in ("stop", "length")
        server = row["server"]
        if whole or tokens:  # else it ended within its prompt: what it computed of it is not known
            yield (tokens[0] if tokens else end_ns), False, {"server": server, "blocks": prompt}
        if output:
            yield end_ns, False, {"server": server, "blocks": output}


def _lookup(row: dict, held: dict[int, int], names: list[str], block_size: int) -> dict[str, object]:
    outcomes = row["prefix_outcomes"] if isinstance(row["prefix_outcomes"], dict) else {}
    hits = int(hit_tokens(outcomes))
    on_server = [0] * len(names)
    for block in row["prompt"]:
        servers = held.get(block, 0)
        while servers:
            lowest = servers & -servers
            on_server[lowest.bit_length() - 1] += block_size
            servers ^= lowest
    own = names.index(row["server"])
    # The server's own index also knows of chunks, and of tiers with blocks of earlier processes.
    on_server[own] = max(on_server[own], _whole(row["infinite_hit_tokens"]), hits)
    best = own if on_server[own] == max(on_server) else int(np.argmax(on_server))
    return {
        "request_id": row["request_id"], "server": row["server"], "ns": int(row["scheduled_ns"]),
        "prompt_tokens": int(sum(outcomes.values())), "hit_tokens": hits, "own_tokens": on_server[own],
        "best_tokens": on_server[best], "best_server": names[best],
        "prefill_ns": float(row["ledger_compute_prefill_ns"] or 0),
    }  # fmt: skip


def _use(name: str, rows: pd.DataFrame, prefill_ns: pd.Series) -> CacheUse:
    sums = rows[["prompt_tokens", "hit_tokens", "own_tokens", "best_tokens"]].sum().astype(int)
    computed = sums.prompt_tokens - sums.hit_tokens
    spent = float(prefill_ns[rows.index].sum())
    return CacheUse(
        name, len(rows), *(int(value) for value in sums), spent / int(computed) if computed > 0 else float("nan")
    )


def _list(value: object) -> list[int]:
    return [] if value is None or isinstance(value, float) else list(value)  # type: ignore[call-overload]


def _whole(count: Any) -> int:
    return 0 if pd.isna(count) else int(count)
