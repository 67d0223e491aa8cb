"""Weights in files, read by position straight to where they belong: no copy of the file, no tensor in between.

Each read says where its bytes came from: the page cache of the system, or the disk below it.
"""

import ctypes
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError

PIECE_BYTES = 1 << 20  # of one read: all of it counts as read from the disk where one page of it is not cached
STAGE_BYTES = 16 << 20  # of the buffer for what cannot be read in place: it is cast, or goes to a device
PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


class WeightFile:
    """A file of tensors that is read with `pread`. Raises ModelError, also for a file that has become shorter."""

    def __init__(self, path: Path, startup: StartupClock):
        self.path = path
        self._startup = startup
        try:
            self._fd = os.open(path, os.O_RDONLY)
            self._cached = cached_pages(self._fd)
        except OSError as error:
            raise self._unreadable(error) from None
        self._stage: torch.Tensor | None = None
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read(self, begin: int, memory: memoryview) -> None:
        """Fills `memory` with the bytes from `begin` on."""
        for first in range(0, len(memory), PIECE_BYTES):
            piece = memory[first : first + PIECE_BYTES]
            self.read_rows(begin + first, piece, len(piece), len(piece))

    def read_rows(self, begin: int, memory: memoryview, size: int, step: int) -> None:
        """Fills `memory` with rows of `size` bytes, each of which begins `step` bytes behind the one before."""
        rows = len(memory) // size
        tier = "page_cache" if self._is_cached(begin, (rows - 1) * step + size) else "disk"
        try:
            with self._startup.reading(tier, len(memory)):
                for row in range(rows):
                    self._fill(begin + row * step, memory[row * size : (row + 1) * size])
        except OSError as error:
            raise self._unreadable(error) from None

    def stage(self, device: torch.device) -> torch.Tensor:
        """[STAGE_BYTES] uint8 of the host, from which copies to `device` are fast; made once."""
        if self._stage is None:
            self._stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        return self._stage

    def _unreadable(self, error: OSError) -> ModelError:
        return ModelError(f"{self.path} is damaged or not complete: {error}; download it again")

    def _fill(self, begin: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], begin + done)
            if not count:
                raise OSError("the file became shorter while it was read")
            done += count

    def _is_cached(self, begin: int, size: int) -> bool:
        return bool(self._cached[begin // PAGE : (begin + size - 1) // PAGE + 1].all())


class FileTensor:
    """A tensor that lies in a file: its outline (of the meta device), and where its bytes begin."""

    def __init__(self, file: WeightFile, begin: int, outline: torch.Tensor):
        self.outline = outline
        self._file, self._begin = file, begin
        self._whole: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        if self._whole is None:
            self._whole = torch.empty(self.outline.shape, dtype=self.outline.dtype)
            self._file.read(self._begin, _memory(self._whole))
        return self._whole

    def fill(self, target: torch.Tensor, view: torch.Tensor) -> None:
        """Puts the part that `view` is, a view of the outline, into `target`, of the same shape and any dtype."""
        if _is_columns(view) and target.is_contiguous():
            self._fill_rows(target.detach(), view)
            return
        if not view.is_contiguous() or not target.is_contiguous():
            target.copy_(self.read().as_strided(view.shape, view.stride(), view.storage_offset()))
            return
        begin = self._begin + view.storage_offset() * view.element_size()
        flat = target.detach().view(-1)
        if flat.device.type == "cpu" and flat.dtype == view.dtype:
            self._file.read(begin, _memory(flat))
            return
        for part, piece in self._staged(begin, flat, view.dtype):
            part.copy_(piece)

    def _fill_rows(self, target: torch.Tensor, view: torch.Tensor) -> None:
        """Row by row, as many at a time as a piece may hold."""
        size, step = (numbers * view.element_size() for numbers in (view.shape[1], view.stride(0)))
        begin = self._begin + view.storage_offset() * view.element_size()
        stage = self._file.stage(target.device)
        if size > len(stage):
            stage = torch.empty(size, dtype=torch.uint8)
        for first, rows in _parts(target, max(1, min(PIECE_BYTES, len(stage)) // size)):
            octets = stage[: len(rows) * size]
            self._file.read_rows(begin + first * step, _memory(octets), size, step)
            rows.copy_(octets.view(view.dtype).view(rows.shape))

    def _staged(
        self, begin: int, flat: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of `flat`, each with its numbers as the file has them."""
        stage = self._file.stage(flat.device)
        for first, part in _parts(flat, STAGE_BYTES // dtype.itemsize):
            octets = stage[: len(part) * dtype.itemsize]
            self._file.read(begin + first * dtype.itemsize, _memory(octets))
            yield part, octets.view(dtype)


def _is_columns(view: torch.Tensor) -> bool:
    """Whether it is some columns of a matrix, of which a rank reads no more: rows lie apart, their numbers do not."""
    return view.dim() == 2 and view.stride(1) == 1 and view.stride(0) > view.shape[1]


def _parts(flat: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    return ((first, flat[first : first + size]) for first in range(0, len(flat), size))


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def tensor_places(path: Path) -> dict[str, int]:
    """Name → where its bytes begin, of a safetensors file whose header the library has checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def cached_pages(fd: int) -> np.ndarray:
    """Of each page of a file: whether the page cache holds it (mincore). All, where the system does not say."""
    size = os.fstat(fd).st_size
    pages = np.ones(-(-size // PAGE), dtype=np.uint8)
    if not size or not hasattr(_libc, "mincore"):
        return pages.astype(bool)
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        file = np.frombuffer(mapped, dtype=np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(file.ctypes.data), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_char_p)
        )
        del file  # else the map cannot be closed
    return np.ones(len(pages), dtype=bool) if failed else (pages & 1).astype(bool)
