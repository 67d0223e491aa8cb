"""Streamed weights are the mapped ones, take no second copy, and say which tier they came from."""

import ctypes
import gc
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sojourn.engine.config import EngineConfig
from sojourn.engine.token.models import weight_file
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.models.weight_file import FileTensor, WeightFile, tensor_places
from sojourn.engine.token.models.weights import TensorFiles
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError
from tests.engine.families import FAMILIES

CPU = torch.device("cpu")
MIB = 1 << 20


def parameters(folder: Path, load_format: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return dict(load_model(folder, dtype, CPU, None, load_format=load_format).named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_equal_mapped_ones(checkpoints, family):
    for dtype in (torch.float32, torch.bfloat16):  # in place, and through the stage with a cast
        streamed, mapped = (parameters(checkpoints[family], f"safetensors-{way}", dtype) for way in ("stream", "mmap"))
        assert streamed and streamed.keys() == mapped.keys()
        for name, tensor in streamed.items():
            assert torch.equal(tensor, mapped[name]), name


def drawn_view(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """What the families' `translate` and ranks take of a tensor: parts of its rows or columns, one of a stack, every
    second, transposed."""
    for _ in range(draw.randint(0, 3)):
        kind = draw.choice(("split", "index", "slice", "step", "transpose", "flat", "columns"))
        if kind == "split" and tensor.dim() and len(tensor):
            tensor = draw.choice(tensor.tensor_split(draw.randint(1, 3)))
        elif kind == "index" and tensor.dim() > 1 and len(tensor):
            tensor = tensor[draw.randrange(len(tensor))]
        elif kind == "slice" and tensor.dim():
            begin = draw.randint(0, len(tensor))
            tensor = tensor[begin : draw.randint(begin, len(tensor))]
        elif kind == "step" and tensor.dim():
            tensor = tensor[draw.randint(0, 1) :: 2]
        elif kind == "columns" and tensor.dim() == 2:  # of a rank
            begin = draw.randint(0, tensor.shape[1])
            tensor = tensor[:, begin : draw.randint(begin, tensor.shape[1])]
        elif kind == "transpose" and tensor.dim() == 2:
            tensor = tensor.t()
        elif kind == "flat" and tensor.is_contiguous():
            tensor = tensor.view(-1)
    return tensor


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_any_part_of_a_stored_tensor_comes_where_it_belongs(tmp_path, monkeypatch, stored, held):
    monkeypatch.setattr(weight_file, "PIECE_BYTES", 64)  # several pieces and stages for each tensor
    monkeypatch.setattr(weight_file, "STAGE_BYTES", 96)
    tensors = {f"t{index}": torch.randn(shape).to(stored) for index, shape in enumerate([(7, 5), (3, 4, 6), (11,), ()])}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    files, draw = TensorFiles(tmp_path), random.Random(0)
    for _ in range(60):
        name = draw.choice(list(tensors))
        lazily, seed = files.stored(name, StartupClock()), draw.random()
        view = drawn_view(lazily.outline, random.Random(seed))
        wanted = drawn_view(tensors[name], random.Random(seed))
        target = torch.full(wanted.shape, 9.0, dtype=held)
        lazily.fill(target, view)
        assert torch.equal(target, wanted.to(held))


def write_large(folder: Path) -> int:
    """A file of two tensors of 40 MiB, which malloc maps and does not take from its heap; their bytes."""
    tensors = {f"part{index}": torch.full((20 * MIB,), float(index), dtype=torch.bfloat16) for index in range(2)}
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.nbytes for tensor in tensors.values())


def peak_growth(work) -> int:
    """Bytes by which the resident memory of this process grew at most (VmHWM, which clear_refs sets back)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the heap that others left is taken first
    Path("/proc/self/clear_refs").write_text("5")
    before, result = memory("VmRSS"), work()
    grown = memory("VmHWM") - before
    del result
    return grown


def memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="a peak cannot be set back here")
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32])
def test_streaming_takes_no_second_copy(tmp_path, held):
    weights = write_large(tmp_path) * held.itemsize // 2

    def load(streams: bool) -> list[torch.Tensor]:
        files = TensorFiles(tmp_path)
        targets = [torch.empty(20 * MIB, dtype=held) for _ in files.names]
        for name, target in zip(files.names, targets, strict=True):
            if streams:
                lazily = files.stored(name, StartupClock())
                lazily.fill(target, lazily.outline)
            else:
                target.copy_(files.read(name))
        return targets

    buffer = 4 * MIB if held == torch.bfloat16 else weight_file.STAGE_BYTES + 4 * MIB
    streamed = peak_growth(lambda: load(streams=True))
    assert streamed <= weights + buffer
    assert peak_growth(lambda: load(streams=False)) > streamed + 50 * MIB, "a map takes the file's pages, too"


def test_bytes_are_counted_by_the_tier_that_they_came_from(tmp_path):
    size, path = write_large(tmp_path), tmp_path / "model.safetensors"
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = []
    for _ in range(2):
        startup, files = StartupClock(), TensorFiles(tmp_path)
        for name in files.names:
            files.stored(name, startup).read()
        found.append(startup.startup())
    cold, warm = found
    assert cold.weight_bytes == warm.weight_bytes == size
    assert warm.read_bytes == {"page_cache": size}
    if cold.read_bytes.get("disk", 0) < size / 2:
        pytest.skip("this file system keeps its pages")
    assert cold.phases_ns["read_disk"] > 0


def test_file_that_became_shorter_is_refused_by_its_name(tmp_path):
    write_large(tmp_path)
    path = tmp_path / "model.safetensors"
    files = TensorFiles(tmp_path)
    last = files.stored(max(files.names), StartupClock())
    os.truncate(path, tensor_places(path)["part1"] + 100)
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or not complete: the file became shorter"):
        last.read()
    gone = tmp_path / "gone"
    with pytest.raises(ModelError, match="gone is damaged or not complete"):
        FileTensor(WeightFile(gone, StartupClock()), 0, torch.empty(1, device="meta"))


def test_load_format_of_another_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="load_format"):
        EngineConfig(model="tiny-model", load_format="pickle")
