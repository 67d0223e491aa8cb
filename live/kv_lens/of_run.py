"""The KV lens of a recorded run: from the records of its requests, and its KV events where there are some."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow.compute as pc

from sojourn.live.kv_lens.document import SIZES, CurvePoint, Enough, KvLens, Reuse, Times
from sojourn.live.kv_lens.intervals import rate_interval
from sojourn.live.kv_lens.of_events import Baseline, Lookups, baseline_of, lens_of_events, pools_of
from sojourn.live.kv_lens.takers import takers_of
from sojourn.live.kv_lens.words import headline_of
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.memory.block_uses import UNKNOWN, BlockUses, block_uses, releases
from sojourn.metrics.memory.miss_ratio import prefix_outcomes
from sojourn.metrics.memory.pool_history import BlockHistory
from sojourn.metrics.memory.prefix_outcomes import RATIOS
from sojourn.metrics.records import KvEventRecord
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory, engine_settings, frame_of, section
from sojourn.metrics.statistics.log_histogram import ExactHistogram

ENOUGH = (0.5, 0.9, 0.99)  # shares of what a cache without eviction hits
TENTH = 0.1
LIVES = ("evicted_age_ns", "evicted_idle_ns", "reuse_gap_ns", "reuse_distance_blocks")  # of steps
OFF = 0.02  # of the prompt tokens: more than the curve's error is at the pool's own size
TOGETHER = "the curve assumes the same batches at every size"


def lens_of_run(run: RunDirectory) -> KvLens:
    """Raises RunDataError where the run tells nothing of its cache."""
    return RunLens(run).document()


class RunLens:
    """What a run tells of its cache, read once. `uses` is None where only events were recorded."""

    def __init__(self, run: RunDirectory):
        """Raises RunDataError where the run tells nothing of its cache."""
        self.run, self.meta = run, run.meta()
        if servers := self.meta.get("servers"):
            names = ", ".join(str(entry.get("name") if isinstance(entry, dict) else entry) for entry in servers)
            raise RunDataError(f"{run.name} is of several servers, each with its own cache; give one of them: {names}")
        self.requests, self.events = run.table("requests"), recorded_events(run)
        recorded = section(self.meta, "kv_events")
        self.history, self.baseline = _history(self.events, recorded.get("baseline_ns"))
        core = section(self.meta, "core")
        size = core.get("block_size") or next(
            (pool.block_size for pool in self.history.pools.values() if pool.block_size), None
        )
        blocks = core.get("num_kv_blocks") or recorded.get("pool_blocks")
        self.block_size = int(size) if size else None
        self.pool_blocks = int(blocks) if blocks else None
        self.uses = self._uses()

    def _uses(self) -> BlockUses | None:
        uses = block_uses(self.requests, self.block_size or 0)
        if uses is None:
            if not self.events:
                raise RunDataError(
                    f"{self.run.name} tells nothing of its cache: its requests have no hashes of blocks, and it has no "
                    "KV events. Our engine with telemetry=full records the hashes, and so does the probe in vLLM "
                    "(docs/probe.md); `sojourn kv-lens ADDRESS --output DIR` records KV events"
                )
            return None
        uses = uses.only(self._counted())
        if not len(uses.ns):
            raise RunDataError(f"{self.run.name} has no lookup among its measured requests")
        return uses

    def _counted(self) -> set[str]:
        """The requests that count: those of the client without its warm-up, or all where no client was there."""
        if not self.run.sources("client"):
            return set(self.requests.request_id)
        client = frame_of(self.run.arrow("client", ("request_id", "due_ns"))).drop_duplicates("request_id")
        return set(measured(client.sort_values("due_ns", ignore_index=True), self.meta).request_id)

    def document(self) -> KvLens:
        uses = self.uses
        if uses is None:
            recorded = section(self.meta, "kv_events")
            return lens_of_events(
                self.history, self.run.name, lookups=_lookups(recorded), pool_blocks=self.pool_blocks,
                baseline=self.baseline, warnings=[str(each) for each in recorded.get("warnings") or []],
            )  # fmt: skip
        asked = self.requests[self.requests.request_id.isin(set(uses.request_ids))]
        pool = self.pool_blocks
        return headline_of(
            KvLens(
                name=self.run.name,
                source="records",
                headline="",
                seconds=float(uses.ns.max() - uses.ns.min()) / 1e9,
                block_size=self.block_size,
                pool_blocks=pool,
                pool_is_peak=False,
                lookups=len(uses.ns),
                queried_tokens=int(uses.queried_tokens.sum()),
                hit_rate=uses.measured_ratio,
                infinite_hit_rate=uses.infinite_ratio,
                curve=_curve(uses, asked, pool),
                curve_error=None if pool is None else uses.hit_ratio(pool) - uses.measured_ratio,
                enough=[
                    Enough(share=share, blocks=blocks, ratio=None if pool is None else blocks / pool)
                    for share in ENOUGH
                    if (blocks := uses.blocks_for(share)) is not None
                ],
                outcomes=_shares(prefix_outcomes(asked)),
                times=self._times(),
                reuse=_reuse(uses),
                takers=takers_of(asked, _classes(self.run, self.requests), self.history),
                pools=pools_of(self.history),
                worth=None,
                unknown=self._unknown(),
                warnings=self._warnings(),
            )
        )

    def block_lives(self) -> dict[str, np.ndarray]:
        """By the names of the columns of `steps.parquet`: ns, and blocks. From the events, where the run has some, else
        from the engine's own sample."""
        steps = self.run.arrow("steps", LIVES)
        found = {name: pc.list_flatten(steps[name]).to_numpy().astype("float64") for name in LIVES}
        if any(event.kind == "removed" for event in self.events):
            found["evicted_age_ns"] = self._exact("lives")
            found["evicted_idle_ns"] = _idle_when_evicted(self.events, self.requests, self.block_size or 0)
        uses = self.uses
        if uses is not None and not len(found["reuse_gap_ns"]):
            found["reuse_gap_ns"] = _idle_before_reuse(uses)
            found["reuse_distance_blocks"] = uses.distance[uses.distance < UNKNOWN].astype(float)
        return found

    def _exact(self, name: str) -> np.ndarray:
        """Of the histogram of that name all numbers, of all pools, ns."""
        return np.array([ns for pool in self.history.pools.values() for ns in getattr(pool, name).values], float)

    def _times(self) -> dict[str, Times]:
        lives = self.block_lives()
        found = {
            "age_when_evicted": lives["evicted_age_ns"],
            "idle_when_evicted": lives["evicted_idle_ns"],
            "idle_before_reuse": _idle_before_reuse(self.uses) if self.uses is not None else np.zeros(0),
            "evicted_before_needed": self._exact("gaps") if self.events else _ago(self.requests, self.block_size or 1),
        }
        return {name: times_of(values) for name, values in found.items() if len(values)}

    def _unknown(self) -> list[str]:
        found = [TOGETHER]
        if self.pool_blocks is None:
            found.append("run.json does not say how many blocks the pool has, so no size can be compared with it")
        if not self.events:
            found.append("eviction times come from a sample of blocks; KV events cover all")
        return found

    def _warnings(self) -> list[str]:
        policy, uses, pool = engine_settings(self.meta).get("eviction_policy"), self.uses, self.pool_blocks
        if policy not in (None, "lru"):
            return [f"the pool evicts by {policy}; the curve is that of pools that evict the block used longest ago"]
        if uses is None or pool is None or abs(uses.hit_ratio(pool) - uses.measured_ratio) <= OFF:
            return []
        return [
            f"at the pool's own size the reuse distances give {uses.hit_ratio(pool):.1%}, and "
            f"{uses.measured_ratio:.1%} was measured: other sizes are off by as much"
        ]


def recorded_events(run: RunDirectory) -> list[KvEventRecord]:
    """The run's KV events, in order of time."""
    table = run.arrow("kv_events")
    if not table.num_rows:
        return []
    names = KvEventRecord.__struct_fields__
    rows = [KvEventRecord(*values) for values in zip(*(table[name].to_pylist() for name in names), strict=True)]
    return sorted(rows, key=lambda event: event.ns)


def _history(
    events: Sequence[KvEventRecord], baseline_ns: int | None
) -> tuple[BlockHistory, dict[tuple[str, str], Baseline] | None]:
    """What the events add up to, and what they had when somebody began to count lookups."""
    history = BlockHistory(most_owners=1 << 20, histogram=ExactHistogram)
    if baseline_ns is None:
        history.apply(events)
        return history, None
    history.apply(event for event in events if event.ns <= baseline_ns)
    baseline = baseline_of(history)
    history.apply(event for event in events if event.ns > baseline_ns)
    return history, baseline


def _lookups(recorded: Mapping[str, Any]) -> Lookups | None:
    try:
        return msgspec.convert(recorded.get("lookups"), Lookups)
    except msgspec.ValidationError:  # nobody counted
        return None


def _curve(uses: BlockUses, asked: pd.DataFrame, pool_blocks: int | None) -> list[CurvePoint]:
    """The hit rate by the size of the pool. At the multiples that the engine's own shadow index judged, its figures:
    they know every block that was in use."""
    infinite = _point(uses, None, None, uses.infinite_tokens)
    if pool_blocks is None:
        return [infinite]
    judged = _judged(uses, asked)
    points = []
    for ratio in SIZES:
        blocks, hits = round(ratio * pool_blocks), judged.get(ratio)
        points.append(_point(uses, ratio, blocks, uses.hits(blocks) if hits is None else hits))
    return [*points, infinite]


def _judged(uses: BlockUses, asked: pd.DataFrame) -> dict[float, np.ndarray]:
    """Size → tokens [lookups] by the shadow index; the sizes that it judged for every lookup."""
    if "resized_hit_tokens" not in asked:
        return {}
    cells = dict(zip(asked.request_id, asked.resized_hit_tokens, strict=True))
    rows = [list(cell) if (cell := cells.get(name)) is not None else [] for name in uses.request_ids]
    width = min(map(len, rows), default=0)
    table = np.array([row[:width] for row in rows], float)
    return {ratio: table[:, at] for at, ratio in enumerate(RATIOS[:width])}


def _point(uses: BlockUses, ratio: float | None, blocks: int | None, hits: np.ndarray) -> CurvePoint:
    low, high = rate_interval(hits, uses.queried_tokens)
    return CurvePoint(
        ratio=ratio, blocks=blocks, hit_rate=float(hits.sum() / uses.queried_tokens.sum()), low=low, high=high,
        saved_tokens=int(hits.sum() - uses.hit_tokens.sum()),
    )  # fmt: skip


def _shares(tokens: Mapping[str, int]) -> dict[str, float]:
    whole = sum(tokens.values())
    return {name: count / whole for name, count in sorted(tokens.items(), key=lambda pair: -pair[1])} if whole else {}


def _reuse(uses: BlockUses) -> Reuse | None:
    if not uses.made:
        return None
    reads = np.sort(uses.reads)[::-1]
    hottest = reads[: max(1, round(TENTH * uses.made))]
    return Reuse(
        blocks=uses.made, read_again_share=min(1.0, len(reads) / uses.made),
        hottest_tenth_share=float(hottest.sum() / reads.sum()) if len(reads) else 0.0,
    )  # fmt: skip


def times_of(ns: np.ndarray) -> Times:
    p10, p50, p90 = (float(value) / 1e9 for value in np.quantile(ns, (0.1, 0.5, 0.9)))
    return Times(blocks=len(ns), p10_s=p10, p50_s=p50, p90_s=p90)


def _idle_before_reuse(uses: BlockUses) -> np.ndarray:
    """Between two readers, ns; of the blocks that lookups found, as far as nobody held them."""
    if not len(uses.lookup):
        return np.zeros(0)
    begins = np.flatnonzero(np.r_[True, uses.lookup[1:] != uses.lookup[:-1]])
    place = np.arange(len(uses.lookup)) - np.repeat(begins, np.diff(np.r_[begins, len(uses.lookup)]))
    was_hit = place < uses.hit_tokens[uses.lookup] / uses.block_size
    return uses.idle_ns[was_hit & (uses.idle_ns > 0)].astype(float)


def _ago(requests: pd.DataFrame, block_size: int) -> np.ndarray:
    """As the prompts tell it, ns: of their evicted blocks the time of the first stands for all."""
    missed = requests[requests.evicted_ago_ns.notna()]
    blocks = [max(1, (cell or {}).get("miss_evicted", 0) // block_size) for cell in missed.prefix_outcomes]
    return np.repeat(missed.evicted_ago_ns.astype("float64").to_numpy(), np.array(blocks, int))


def _idle_when_evicted(events: Sequence[KvEventRecord], requests: pd.DataFrame, block_size: int) -> np.ndarray:
    """Between the end of a block's last reader and its eviction, ns; of blocks whose readers are recorded."""
    if "prompt_block_hashes" not in requests or not block_size:
        return np.zeros(0)
    ended = iter(sorted(releases(requests, block_size), key=lambda each: each[0]))
    upcoming = next(ended, None)
    last: dict[int, int] = {}
    idle = []
    for event in events:
        while upcoming is not None and upcoming[0] <= event.ns:
            last.update(dict.fromkeys(upcoming[1], upcoming[0]))
            upcoming = next(ended, None)
        if event.kind == "removed":
            idle += [event.ns - last[block] for block in event.hashes if block in last]
    return np.array(idle, float)


def _classes(run: RunDirectory, requests: pd.DataFrame) -> dict[str, str]:
    """Request → class: the client's, which a foreign server does not know, or the server's."""
    source = frame_of(run.arrow("client", ("request_id", "klass"))) if run.sources("client") else requests
    return dict(zip(source.request_id, source.klass.fillna(""), strict=True))
