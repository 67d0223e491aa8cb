"""Blocks of host memory that somebody waits for, or that are held for somebody until it lets go."""

from collections.abc import Callable, Sequence

from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.store import Moved
from sojourn.engine.techniques.tiers.transfers import Prefetch


class Holds:
    """A block that is held is pinned in host memory. Who waits for one holds it from the moment it can be read."""

    def __init__(self, host: TierIndex):
        self._host = host
        self.waiting: dict[bytes, list[Prefetch]] = {}  # key → those that wait until it can be read

    def hold(self, prefetch: Prefetch, key: bytes) -> None:
        self._host.prepare_load(key)
        prefetch.held.append(key)

    def wait(self, prefetch: Prefetch, key: bytes) -> None:
        self.waiting.setdefault(key, []).append(prefetch)
        prefetch.reads_left += 1

    def hold_or_wait(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._host.lookup(key):
                self.hold(prefetch, key)
            else:
                self.wait(prefetch, key)

    def wake(self, key: bytes, *, ok: bool, read: Moved | None = None) -> None:
        """The block can be read from now on; or it did not come."""
        for prefetch in self.waiting.pop(key, ()):
            prefetch.reads_left -= 1
            if read is not None:
                prefetch.has_read(read)
            if ok and not prefetch.is_cancelled:
                self.hold(prefetch, key)

    def stop_waiting(self, prefetch: Prefetch, keys: Sequence[bytes], unless: Callable[[bytes], bool]) -> None:
        """For those of the keys that nobody brings any more."""
        for key in keys:
            if key not in self.waiting or unless(key):
                continue
            others = [other for other in self.waiting[key] if other is not prefetch]
            prefetch.reads_left -= len(self.waiting[key]) - len(others)
            if others:
                self.waiting[key] = others
            else:
                del self.waiting[key]

    def let_go(self, prefetch: Prefetch) -> None:
        """Nothing is held for it any more."""
        prefetch.is_cancelled = True
        for key in prefetch.held:
            self._host.complete_load(key)
        prefetch.held.clear()
