"""A store over a medium: one thread reads, another one writes."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from sojourn.engine.techniques.tiers.store import Answer, Medium, Moved
from sojourn.engine.techniques.tiers.worker import Worker

CLOSE_S = 5.0  # that an ending process gives to the read and the write under way


class MediumStore:
    """A BlockStore. Whatever an operation raises is its failure: a read that never ended would hold its request."""

    def __init__(self, medium: Medium):
        self.name, self.block_bytes = medium.name, medium.block_bytes
        self.is_closing = False
        self.reads, self._writes = Worker(f"kv-{self.name}-read"), Worker(f"kv-{self.name}-write")
        self.medium = medium
        self._finished: deque[Moved] = deque()

    def known(self) -> list[bytes]:
        return self.medium.known()

    def read(self, key: bytes, slot: int) -> None:
        self.reads.submit(lambda: self._move(key, True, lambda: self.medium.read(key, slot)))

    def write(self, key: bytes, slot: int) -> None:
        def written() -> bool:
            self.medium.write(key, slot)
            return True

        self._writes.submit(lambda: self._move(key, False, written))

    def remove(self, key: bytes) -> None:
        self._writes.submit(lambda: self._remove(key))

    def finished(self) -> list[Moved]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def wait(self) -> None:
        time.sleep(0.002)

    def close(self) -> None:
        self.is_closing = True
        has_read, has_written = self.reads.close(CLOSE_S), self._writes.close(CLOSE_S)
        if has_read and has_written:  # else a thread still uses the medium, and the end of the process closes it
            self.medium.close()

    def _move(self, key: bytes, is_read: bool, work: Callable[[], bool]) -> None:
        began_ns = time.monotonic_ns()
        try:
            ok = not self.is_closing and work()
        except Exception as error:
            ok = False
            self.medium.failed("read" if is_read else "write", error)
        self._finished.append(Moved(key, is_read, ok, self.block_bytes, began_ns, time.monotonic_ns()))

    def _remove(self, key: bytes) -> None:
        try:
            self.medium.remove(key)
        except Exception as error:
            self.medium.failed("remove", error)


class MediumQuestions:
    """Questions to the medium of a store, in the thread that reads from it. `count_known` waits for the answer."""

    def __init__(self, store: MediumStore, count_known: Callable[[Sequence[bytes]], int]):
        self._store, self._count_known = store, count_known
        self._answers: deque[Answer] = deque()

    def ask(self, number: int, keys: Sequence[bytes]) -> None:
        self._store.reads.submit(lambda: self._ask(number, keys))

    def answers(self) -> list[Answer]:
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def _ask(self, number: int, keys: Sequence[bytes]) -> None:
        num_known = 0 if self._store.is_closing else self._count_known(keys)
        self._answers.append(Answer(number, num_known, time.monotonic_ns()))
