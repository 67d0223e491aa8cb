"""Where a model sleeps: its KV pool is given back, and on a GPU its weights wait in host memory.

On a CPU the weights stay where they are: the device's memory is the host's.
"""

import ctypes
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from sojourn.engine.compute.kv_cache import parts

if TYPE_CHECKING:
    from sojourn.engine.runner.runner import ModelRunner

MADV_DONTNEED = 4  # asm-generic/mman-common.h
_libc = ctypes.CDLL(None, use_errno=True)


class Bed:
    """Of one runner. Its tensors stay the same objects; on a GPU their memory has other addresses after the sleep."""

    def __init__(self, runner: "ModelRunner"):
        self._runner = runner
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._dropped_graphs = False

    def lie_down(self) -> tuple[int, int]:
        """Bytes of the KV pool that were given back, and of weights that went to the host. No step is under way, and no
        block holds anything that is needed."""
        runner = self._runner
        runner.stream.drain()
        pool = [part.untyped_storage() for part in parts(runner.eager.kv_cache)]
        if runner.placed.device.type == "cpu":
            return sum(map(drop_pages, pool)), 0
        runner.forward.drop_graphs()  # they know the addresses
        self._dropped_graphs = True
        own = [technique.weights() for technique in runner.techniques]
        return self.put_away(pool, list(storages(runner.placed.model, own).values()))

    def put_away(self, pool: list[torch.UntypedStorage], weights: list[torch.UntypedStorage]) -> tuple[int, int]:
        """Takes the memory of both, and copies the contents of the latter to the host first. The bytes of each."""
        for storage in weights:
            self._moved.append((storage, _copied(storage)))
            storage.resize_(0)
        for storage in pool:
            self._emptied.append((storage, storage.nbytes()))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(size for _, size in self._emptied), sum(held.nbytes() for _, held in self._moved)

    def leave(self) -> None:
        """Gives all of them memory, and the weights their contents. Raises torch's error where it is not free."""
        for storage, held in self._moved:
            storage.resize_(held.nbytes())
            storage.copy_(held)
        for storage, size in self._emptied:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._emptied, self._moved = [], []
        if self._dropped_graphs:
            self._runner.forward.capture()
            self._dropped_graphs = False


def storages(*roots: Any) -> dict[int, torch.UntypedStorage]:
    """Those of all tensors that objects of ours hold, however deep."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(roots)}


def drop_pages(storage: torch.UntypedStorage) -> int:
    """The whole pages within memory of the host become zero pages, which take none before they are written: addresses
    stay. The bytes of it."""
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin and _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the KV pool's memory cannot be given back")
    return max(0, end - begin)


def _copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    held = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda").untyped_storage()
    held.copy_(storage)
    return held


def _tensors(roots: tuple) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif type(value).__module__.startswith(("sojourn.engine.", "torch.nn.")):
            waiting += getattr(value, "__dict__", {}).values()
            names = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
            waiting += [getattr(value, name) for name in names if name != "__weakref__" and hasattr(value, name)]
