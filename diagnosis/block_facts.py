"""What the records say about the blocks of the KV pool: room in them that holds nothing, and blocks that nobody holds.

Pure functions over rows of `requests`, all that the server recorded, and of `steps`.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sojourn.diagnosis.memory_facts import pool_blocks

STRETCHES = 4  # of a run, in each of which a leak has grown or has not
SPARE_BLOCKS = 2  # of a request beyond its tokens: the step under way, and a fork's copy


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Positions of active blocks that hold no token. Shares are means over the time of the steps."""

    unwritten_share: float  # of the positions in active blocks; also those of a prompt that is still being computed
    tail_share: (
        float  # of the positions in the last block of each request, by the lengths: what a smaller block would spare
    )
    pool_use: float  # active blocks, of the pool

    def tail_share_with(self, block_size: int, other_size: int) -> float:
        """With blocks of another size; a tail is half a block on average."""
        return min(1.0, self.tail_share * other_size / block_size)


@dataclass(frozen=True, slots=True)
class Leak:
    """Blocks that are active beyond what the requests inside the server can hold. A lower bound at any moment: requests
    may hold less than they can."""

    blocks: int  # at the end: the most in the last stretch of the run
    by_stretch: list[int]  # the most that was seen, in each of STRETCHES equal spans of the steps
    share_of_pool: float
    blocks_per_request: float  # of those that ended
    steps: tuple[int, int]  # the first step that has more than can be held, and the last one; (0, 0) without any

    @property
    def stays(self) -> bool:
        """More at the end than at the beginning, and never fewer than before: a pool that is full leaks no more."""
        return self.by_stretch[-1] > self.by_stretch[0] and bool((np.diff(self.by_stretch) >= 0).all())


def fragmentation(requests: pd.DataFrame, steps: pd.DataFrame, block_size: int) -> Fragmentation | None:
    active = _numbers(steps, "blocks_active")
    if not len(steps) or not active.sum() or "slots_written" not in steps:
        return None
    span = np.maximum((steps.end_ns - steps.begin_ns).to_numpy("float64"), 1.0)
    written, allocated = _numbers(steps, "slots_written"), active * block_size
    if not written.sum():  # of an older run
        return None
    running = np.array([len(ids) for ids in steps.request_ids], "float64")
    tail_slots = (running * span).sum() / span.sum() * _tail_tokens(requests, block_size)
    held_slots = (allocated * span).sum() / span.sum()
    return Fragmentation(
        unwritten_share=float(1 - (written * span).sum() / (allocated * span).sum()),
        tail_share=float(min(1.0, tail_slots / held_slots)),
        pool_use=float((active * span).sum() / span.sum() / max(pool_blocks(steps), 1)),
    )


def _tail_tokens(requests: pd.DataFrame, block_size: int) -> float:
    """The mean number of free positions in a request's last block while it decodes."""
    prompt, output = _lengths(requests)
    if not len(prompt):
        return (block_size - 1) / 2
    free = [(-np.arange(p, p + o + 1) % block_size).mean() for p, o in zip(prompt, output, strict=True)]
    return float(np.average(free, weights=output + 1))


def leak(requests: pd.DataFrame, steps: pd.DataFrame, block_size: int) -> Leak | None:
    """`requests` must be all that the server recorded: what a request that is missing holds is taken from its steps."""
    if not len(steps) or "scheduled_ns" not in requests:
        return None
    steps = steps.sort_values("step", ignore_index=True)
    begin_ns, end_ns = steps.begin_ns.to_numpy("int64"), steps.end_ns.to_numpy("int64")
    held = _count_held(requests, begin_ns, end_ns, block_size) + _count_unrecorded(requests, steps, block_size)
    active = _numbers(steps, "blocks_active")
    beyond = np.maximum(active - held, 0.0)
    stretches = np.array_split(beyond, STRETCHES)
    by_stretch = [int(stretch.max()) if len(stretch) else 0 for stretch in stretches]
    found = np.flatnonzero(beyond > 0)
    ended = int((requests.finished_ns.astype("float64") <= end_ns[-1]).sum()) if "finished_ns" in requests else 0
    numbers = steps.step.to_numpy()
    return Leak(
        blocks=by_stretch[-1], by_stretch=by_stretch, share_of_pool=by_stretch[-1] / max(pool_blocks(steps), 1),
        blocks_per_request=by_stretch[-1] / ended if ended else 0.0,
        steps=(int(numbers[found[0]]), int(numbers[found[-1]])) if len(found) else (0, 0),
    )  # fmt: skip


def _count_held(requests: pd.DataFrame, begin_ns: np.ndarray, end_ns: np.ndarray, block_size: int) -> np.ndarray:
    """[num_steps] the most blocks that the recorded requests inside the server can hold during each step. The core
    releases them before the last byte is written."""
    rows = requests[requests.scheduled_ns.notna() & requests.finished_ns.notna()]
    prompt, output = _lengths(rows)
    blocks = np.ceil(prompt / block_size) + np.ceil(output / block_size) + SPARE_BLOCKS
    came = np.searchsorted(end_ns, rows.scheduled_ns.to_numpy("int64"), side="left")  # the first step that it can be in
    left = np.searchsorted(begin_ns, rows.finished_ns.to_numpy("int64"), side="right")  # behind the last one
    change = np.zeros(len(begin_ns) + 1)
    np.add.at(change, came, blocks)
    np.subtract.at(change, np.maximum(came, left), blocks)
    return np.cumsum(change)[:-1]


def _count_unrecorded(requests: pd.DataFrame, steps: pd.DataFrame, block_size: int) -> np.ndarray:
    """[num_steps] the same of requests that have no record, such as those that still run: from their first step on."""
    known = set(requests.request_id)
    change, first, longest = np.zeros(len(steps)), {}, {}
    columns = zip(steps.request_ids, steps.past_tokens, steps.new_tokens, strict=True)
    for at, (names, past, new) in enumerate(columns):
        for name, before, added in zip(names, past, new, strict=True):
            if name not in known and name.split("#", 1)[0] not in known:
                first.setdefault(name, at)
                longest[name] = max(longest.get(name, 0), before + added)
    for name, at in first.items():
        change[at] += np.ceil(longest[name] / block_size) + SPARE_BLOCKS
    return np.cumsum(change)


def _lengths(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and output tokens as the server counts them."""
    names = [f"server_{name}" if f"server_{name}" in rows else name for name in ("prompt_tokens", "output_tokens")]
    prompt, output = (rows[name].astype("float64").fillna(0).to_numpy() for name in names)
    return prompt, output


def _numbers(rows: pd.DataFrame, name: str) -> np.ndarray:
    return rows[name].astype("float64").to_numpy() if name in rows else np.zeros(len(rows))
