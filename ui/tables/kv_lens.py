"""The KV lens of a run, shaped for showing: whole runs only, since every request changed the cache for the others."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.live.kv_lens.document import KvLens
from sojourn.live.kv_lens.of_run import RunLens
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.run_data import RunData
from sojourn.ui.text import number

MOST_REQUESTS = 10_000  # of a run that a page looks at: the lens of more takes seconds
NO_BOUNDS = "–"


@dataclass(frozen=True, slots=True)
class ShownLens:
    """`lens` is None where there is none, for the reason `why`."""

    lens: KvLens | None
    lives: dict[str, np.ndarray]  # by the columns of steps.parquet
    why: str = ""


def lens_of(run: RunData) -> ShownLens:
    if run.fleet is not None:
        return ShownLens(None, {}, "A fleet has a cache a server: open the run of a server.")
    if run.sent > MOST_REQUESTS:
        return ShownLens(
            None, {}, f"This run has more than {MOST_REQUESTS:,} requests: `sojourn kv-lens {run.name}` reads it."
        )
    try:
        found = RunLens(RunDirectory(run.path))
        return ShownLens(found.document(), found.block_lives())
    except RunDataError as error:
        return ShownLens(None, {}, f"{error}.")


def sizes(lens: KvLens) -> pd.DataFrame:
    """A row a size of the pool, as text."""
    rows = [
        {
            "memory": "no eviction" if point.ratio is None else f"{point.ratio:g} times",
            "blocks": NO_BOUNDS if point.blocks is None else f"{point.blocks:,}",
            "hit rate": _percent(point.hit_rate),
            "95% interval": NO_BOUNDS if point.low is None or point.high is None
            else f"{point.low:.1%} to {point.high:.1%}",
            "prompt tokens saved": NO_BOUNDS if point.saved_tokens is None
            else f"{point.saved_tokens:+,}" if point.saved_tokens else "0",
        }
        for point in lens.curve
    ]  # fmt: skip
    return pd.DataFrame(rows)


def takers(lens: KvLens) -> pd.DataFrame:
    """Who needed the room of evicted blocks, as text."""
    rows = [
        {
            "who": each.name, "is a": each.kind,
            "blocks evicted for it": NO_BOUNDS if each.evicted_blocks is None else number(float(each.evicted_blocks)),
            "tokens of them needed again": number(float(each.missed_tokens)),
            "by": ", ".join(each.victims) or NO_BOUNDS,
        }
        for each in lens.takers
    ]  # fmt: skip
    return pd.DataFrame(rows)


def pools(lens: KvLens) -> pd.DataFrame:
    """What KV events tell of each medium, as text."""
    rows = [
        {
            "server": each.server or NO_BOUNDS, "medium": each.medium, "blocks held": number(float(each.held)),
            "most at once": number(float(each.peak)), "stored": number(float(each.stored)),
            "of these after an eviction": number(float(each.stored_again)), "evicted": number(float(each.removed)),
            "messages lost": number(float(each.lost_messages)),
        }
        for each in lens.pools
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _percent(share: float | None) -> str:
    return NO_BOUNDS if share is None else f"{share:.1%}"
