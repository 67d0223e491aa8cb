"""A dense checkpoint → a quantised one, in a new folder: whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sojourn.engine.compute.quantisation.rounding import GROUPS, common_group
from sojourn.engine.token.checkpoint import read_config, read_json
from sojourn.engine.token.gguf.file import gguf_path
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.models.weights import TensorFiles
from sojourn.engine.token.quantise.gguf_writer import KINDS, write_gguf
from sojourn.engine.token.quantise.layouts import LAYOUTS, Layout
from sojourn.engine.token.quantise.scaling import scale_by_activations
from sojourn.engine.token.quantised.registry import weight_scheme
from sojourn.engine.token.text.template_sources import TEMPLATE_FOLDER
from sojourn.metrics.errors import ModelError

TARGETS = (*LAYOUTS, *(f"gguf-{kind.lower()}" for kind in KINDS))
CPU = torch.device("cpu")
SHARD_BYTES = 4 << 30


def quantise_checkpoint(
    source: Path, to: str, target: Path, *, group_size: int | None = None, calibration: list[int] | None = None
) -> int:
    """Writes `target`, a folder that must not exist. With `calibration`, ids of a text, weights are scaled by
    activations before they are rounded. Returns how many layers were scaled. Raises ModelError.

    The dense model is held in float32 meanwhile: four bytes a weight.
    """
    if target.exists():
        raise ModelError(f"{target} exists; give a folder that does not")
    config = read_config(source)
    if gguf_path(source) is not None or weight_scheme(config) is not None:
        raise ModelError(f"{source} is quantised already; give the dense checkpoint")
    model = load_model(source, torch.float32, CPU, None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ModelError(f"{target.parent} cannot be written: {error.strerror}") from None
    try:
        scaled = _write(model, source, config, to, unfinished, group_size, calibration)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return scaled


def _write(
    model: Decoder, source: Path, config: dict[str, Any], to: str, folder: Path, group_size: int | None,
    calibration: list[int] | None,
) -> int:  # fmt: skip
    files = TensorFiles(source)
    layers = set(_quantised_names(model, files))
    kind = to.removeprefix("gguf-").upper()
    if to.startswith("gguf-"):
        if group_size is not None:
            raise ModelError("a GGUF format has groups of its own size; leave the group size out")
        scaled = 0 if calibration is None else scale_by_activations(model, calibration, KINDS[kind].back)
        write_gguf(folder / f"{source.name}-{kind}.gguf", source, config, dict(_named(model, files)), kind)
        return scaled
    layout = LAYOUTS[to]
    group = _group(files, layout, layers, group_size)
    scaled = 0
    if calibration is not None:
        scaled = scale_by_activations(model, calibration, lambda weight: layout.rounded(weight, group).dequantised())
    _save(folder, _stored(model, files, layout, layers, group))
    quantisation = layout.config(group)
    if "ignore" in quantisation:  # its target is every linear layer
        quantisation["ignore"] += _dense_routers(model, files)
    settings = read_json(source, "config.json") | {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    copy_texts(source, folder)
    return scaled


def _dense_routers(model: Decoder, files: TensorFiles) -> list[str]:
    """The linear layers of a mixture that choose its experts, as the checkpoint names them."""
    routers = (".gate.weight", ".router.weight")
    return [name.removesuffix(".weight") for name, _ in _named(model, files) if name.endswith(routers)]


def copy_texts(source: Path, folder: Path) -> None:
    """The tokenizer, its template, and what else a checkpoint says in small files."""
    for path in sorted(source.iterdir()):
        text = path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != "config.json"
        if path.is_file() and text and not path.name.endswith(".index.json"):
            shutil.copy(path, folder)
    if (templates := source / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(templates, folder / TEMPLATE_FOLDER, dirs_exist_ok=True)


def _slice_of(
    model: Decoder, slices: dict[str, torch.Tensor], files: TensorFiles, name: str
) -> tuple[str, torch.Tensor]:
    """Our name and the values of a tensor of the checkpoint. Raises ModelError where it is not one of ours."""
    outline = files.outline(name)
    found = list(model.config.translate(name, outline))
    if len(found) != 1 or found[0][1].shape != outline.shape:
        raise ModelError(
            f"tensor {name} holds several of this model's matrices, or another order; it cannot be written"
        )
    return found[0][0], slices[found[0][0]]


def _named(model: Decoder, files: TensorFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of the checkpoint that the model uses, by its own name, with the model's values."""
    slices = model.slices()
    for name in files.names:
        used = not name.endswith("rotary_emb.inv_freq") and (name != "lm_head.weight" or name in slices)
        if used:
            yield name, _slice_of(model, slices, files, name)[1]


def _quantised_names(model: Decoder, files: TensorFiles) -> Iterator[str]:
    """The weights of linear layers and experts, but the head's."""
    slices, matrices = model.slices(), model.quantisable()
    for name, _ in _named(model, files):
        if _slice_of(model, slices, files, name)[0] in matrices:
            yield name


def _group(files: TensorFiles, layout: Layout, layers: set[str], group_size: int | None) -> int | None:
    """That of the layout: what was asked for, or the largest usual one that divides the inputs of all layers."""
    shapes = {name: files.outline(name).shape for name in layers}
    for name, (outputs, inputs) in shapes.items():
        if outputs % layout.outputs_divide_by or inputs % layout.inputs_divide_by:
            raise ModelError(
                f"tensor {name} has shape {[outputs, inputs]}; this layout needs multiples of "
                f"{layout.outputs_divide_by} outputs and {layout.inputs_divide_by} inputs"
            )
    if not layout.grouped:
        if group_size is not None:
            raise ModelError("this format has one scale an output; leave the group size out")
        return None
    sizes = {inputs for _, inputs in shapes.values()}
    group = common_group(sizes) if group_size is None else group_size
    if group is None or any(size % group for size in sizes):
        raise ModelError(f"no group of {group or GROUPS[-1]} divides the inputs of all layers, {sorted(sizes)}")
    return group


def _stored(
    model: Decoder, files: TensorFiles, layout: Layout, layers: set[str], group: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in _named(model, files):
        if name in layers:
            module = name.removesuffix(".weight")
            for suffix, part in layout.tensors(layout.rounded(values, group)).items():
                yield module + suffix, part
        else:
            yield name, values.to(files.outline(name).dtype)


def _save(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """One file, or several of SHARD_BYTES with an index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors:
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
