"""Fills the masks of a step's grammars in threads, while the device computes."""

import threading
import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from sojourn.engine.techniques.grammar.grammar import Guide

# CPU time that the masks of one output may take beyond the usual. A request that takes more ends: others wait for it.
MASK_CPU_SECONDS = 0.25
USUAL_CPU_SECONDS = 0.01  # of one mask; most take less than a tenth of it
POLL_SECONDS = 0.02


class MaskFill:
    """The masks of one step under way. Workers take the next guide from one iterator, and say which they are at.

    A guide has a mask for its next token, and one behind each of its drafts.
    """

    def __init__(self, guides: Sequence[Guide], stop_token_ids: Sequence[list[int]], drafts: Sequence[tuple[int, ...]]):
        self.guides = guides
        self._starts = [0, *accumulate(1 + len(each) for each in drafts)]  # of each guide's masks
        self.masks = np.zeros((self._starts[-1], guides[0].words), dtype=np.int32)
        self._stops = stop_token_ids
        self._drafts = drafts
        self._rows = iter(range(len(guides)))
        self._at: dict[int, tuple[int, int]] = {}  # thread → row, CPU time when it began
        self._timed_out: set[int] = set()
        self._left = len(guides)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def work(self) -> None:
        """Runs in a worker thread."""
        thread = threading.get_ident()
        while (row := self._take(thread)) is not None:
            try:
                masks = self.masks[self._starts[row] : self._starts[row + 1]]
                self.guides[row].fill_drafted(masks, self._stops[row], self._drafts[row])
            except Exception as error:  # whatever it is, it concerns this request alone
                self.guides[row].error = f"the grammar could not be followed: {error!r}"[:300]
            with self._lock:
                self.guides[row].overtime_ns += self._overtime_ns(thread)
                del self._at[thread]
                self._judge(row)
                if row in self._timed_out:
                    return
                self._finish_one()

    def wait(self, more_workers) -> torch.Tensor:
        """[masks, words] int32, once all are filled. A guide that takes too long gets an error; more workers go on."""
        while not self._done.wait(POLL_SECONDS):
            if self._give_up_slow_ones():
                more_workers()
        return torch.from_numpy(self.masks)

    def _take(self, thread: int) -> int | None:
        with self._lock:
            row = next(self._rows, None)
            if row is not None:
                self._at[thread] = (row, time.thread_time_ns())
            return row

    def _give_up_slow_ones(self) -> bool:
        found = False
        with self._lock:
            for thread, (row, _) in self._at.items():
                if row not in self._timed_out and self._judge(row, self._overtime_ns(thread)):
                    self._timed_out.add(row)
                    self._finish_one()
                    found = True
        return found

    def _overtime_ns(self, thread: int) -> int:
        """What a thread's present row has taken beyond the usual."""
        spent_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(thread)) - self._at[thread][1]
        return max(0, spent_ns - round(USUAL_CPU_SECONDS * 1e9))

    def _judge(self, row: int, under_way_ns: int = 0) -> bool:
        """Ends a grammar that took too much in all."""
        guide = self.guides[row]
        too_much = guide.overtime_ns + under_way_ns > MASK_CPU_SECONDS * 1e9
        if too_much:
            guide.error = (
                f"the grammar needs more than {MASK_CPU_SECONDS:g} s to tell which tokens may come next; "
                "make it simpler, or its repetitions smaller"
            )
        return too_much

    def _finish_one(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._done.set()
