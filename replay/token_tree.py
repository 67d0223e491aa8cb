"""Token ids for recorded requests: two prompts share as long a beginning as they did in the run, and no more."""

from collections.abc import Sequence
from itertools import count, islice, takewhile
from typing import Any

import numpy as np
import pandas as pd


def give_token_ids(frame: pd.DataFrame, requests: Sequence[Any]) -> None:
    """Sets `token_ids` (prompt and output), `shared_tokens` and `foreign_tokens` of each request, in order of `due_ns`.

    A run's `prefix_source` and `prefix_shared_tokens` tell which earlier request shares the longest prefix. Older runs
    lack them. There the tokens that a cache without eviction would have hit are shared. The source is the turn before,
    or the first request of the class with the same shared prefix. A foreign server knows neither: there the schedule
    tells what was sent.
    """
    places = {request.id: place for place, request in enumerate(requests)}
    fresh = count(1)
    rooms: dict[tuple[str, int], int] = {}  # class and shared prefix → a request that has it
    exact = "prefix_source" in frame and frame.prefix_source.notna().any()
    rows = list(frame.itertuples(index=False))
    order = np.arange(len(rows))
    if exact:  # a source got a place before, which may be another order than that of the due moments
        order = np.argsort(frame.scheduled_ns.astype("float64").fillna(np.inf).to_numpy(), kind="stable")
    for place in order.tolist():
        request, row = requests[place], rows[place]
        room = (request.klass, -1 if pd.isna(row.shared_prefix) else int(row.shared_prefix))
        if exact:
            source = places.get(row.prefix_source) if isinstance(row.prefix_source, str) else None
            shared = 0 if source is None or pd.isna(row.prefix_shared_tokens) else int(row.prefix_shared_tokens)
        else:
            source = request.follows if request.follows is not None else rooms.get(room)
            shared = _shared_tokens(row) if not pd.isna(row.infinite_hit_tokens) else _sent_again(request, row)
        known = requests[source].token_ids if source is not None else []
        beginning = known[: min(shared, request.prompt_tokens)]
        lacking = request.prompt_tokens + request.output_tokens - len(beginning)
        request.token_ids = [*beginning, *islice(fresh, lacking)]
        request.shared_tokens = request.foreign_tokens = len(beginning)
        if source is not None and requests[source].head == request.head:
            request.foreign_tokens = min(len(beginning), requests[source].foreign_tokens)
        rooms.setdefault(room, place)


def with_sources_by_hash(frame: pd.DataFrame, block_size: int) -> pd.DataFrame:
    """The frame with a source by the hashes of blocks, where they tell of more than the server did.

    A server of a fleet names the one among its own requests; hashes are alike on all servers. Of a request that ended
    in the queue nobody looked for one.
    """
    if "prompt_block_hashes" not in frame:
        return frame
    sources, shared = frame.prefix_source.astype(object).tolist(), frame.prefix_shared_tokens.tolist()
    holders: dict[int, str] = {}  # block → a request whose sequence has it
    order = np.argsort(frame.scheduled_ns.astype("float64").fillna(np.inf).to_numpy(), kind="stable")
    columns = [frame[name].tolist() for name in ("request_id", "prompt_block_hashes", "output_block_hashes")]
    for place in order.tolist():
        name, prompt, output = (column[place] for column in columns)
        prompt, output = (each if isinstance(each, list | np.ndarray) else () for each in (prompt, output))
        known = list(takewhile(holders.__contains__, prompt))
        if known and not len(known) * block_size <= (0 if pd.isna(shared[place]) else shared[place]):
            sources[place], shared[place] = holders[known[-1]], len(known) * block_size
        for block in (*prompt, *output):
            holders.setdefault(block, name)
    return frame.assign(prefix_source=sources, prefix_shared_tokens=shared)


def _sent_again(request: Any, row: Any) -> int:
    """By the schedule: a turn begins with the turn before it, and others with the shared prefix of their class."""
    if request.follows is not None:
        return request.prompt_tokens
    return 0 if pd.isna(row.shared_prefix_tokens) else int(row.shared_prefix_tokens)


def _shared_tokens(row: Any) -> int:
    hit = int(row.infinite_hit_tokens)
    if hit and not pd.isna(row.diverged_at):
        return max(hit, int(row.diverged_at))
    return hit
