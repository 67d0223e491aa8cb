"""The drafters that have weights: what they will take before anything is loaded, and their proposers.

Each kind is outlined first, from config.json and the headers of the weights, as the target is: a folder that does not
fit the target is refused before the server takes its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sojourn.engine.compute.backends import make_attention, make_operations
from sojourn.engine.compute.kv_cache import KVLayout, allocate, bytes_per_token
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.weight_formats import WeightFormat
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.techniques.speculation.proposers import eagle3, medusa, mtp
from sojourn.engine.techniques.speculation.proposers.draft_model import DraftModelProposer
from sojourn.engine.techniques.speculation.proposers.head_files import (
    HeadFiles,
    Translate,
    filled,
    head_bytes,
    head_format,
    loaded,
    outlining,
)
from sojourn.engine.techniques.speculation.proposers.layer_chain import LayerChainProposer
from sojourn.engine.techniques.speculation.proposers.proposer import Proposer
from sojourn.engine.token.checkpoint import read_config, read_json
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.engine.token.models.settings import section
from sojourn.engine.token.models.weights import iterate_weights, outlined_weights
from sojourn.metrics.errors import ModelError


@dataclass(frozen=True, slots=True)
class Drafter:
    """One that fits its target, not loaded yet."""

    weight_bytes: int
    kv_layout: KVLayout | None  # None: it has no keys and values
    num_layers: int
    kv_bytes_per_token: int
    widest_activation: int  # numbers of one token that live together in its widest layer
    load: Callable[[PlacedModel, int, int], Proposer]  # the loaded target, KV blocks and their size → its proposer


def outlined_drafter(config: EngineConfig, target: PlacedModel) -> Drafter | None:
    """The drafter of the setting `speculation`; None for one without weights. Raises ModelError where it does not fit
    the target."""
    outline = {"draft-model": _draft_model, "medusa": _medusa, "eagle3": _eagle3, "mtp": _mtp}.get(config.speculation)
    return None if outline is None else outline(config, target)


def _draft_model(config: EngineConfig, target: PlacedModel) -> Drafter:
    folder = model_folder(config.speculation_model)
    try:
        read_config(folder)
        options = dict(max_model_len=target.max_model_len, weights=config.weights)
        outline = outlined_model(folder, target.dtype, target.device, **options)
    except ModelError as error:
        raise ModelError(f"speculation_model {config.speculation_model}: {error}") from None
    model, known = outline.model, target.model.config.vocab_size
    _check_vocabulary(folder, target.folder, model.config.vocab_size, known)

    def load(target: PlacedModel, num_blocks: int, block_size: int) -> Proposer:
        model = load_model(folder, target.dtype, target.device, **options)
        cache = allocate(model.kv_layout, len(model.layers), num_blocks, block_size, target.kv_dtype, target.device)
        return DraftModelProposer(model, cache, block_size, *_kernels(config, target), target.max_tokens)

    return Drafter(
        outline.weight_bytes + model.rope_bytes(outline.max_model_len),
        model.kv_layout,
        len(model.layers),
        bytes_per_token(model.kv_layout, len(model.layers), target.kv_dtype),
        model.widest_activation + 2 * model.config.hidden_size,
        load,
    )


def _medusa(config: EngineConfig, target: PlacedModel) -> Drafter:
    files = HeadFiles(model_folder(config.speculation_model))
    packed = head_format(files.folder, config.weights, target.dtype, target.device)

    def outline(model: Decoder) -> tuple[medusa.MedusaHeads, Translate]:
        heads = medusa.outlined_heads(files, model)
        return heads, partial(medusa.translate_heads, heads)

    def load(target: PlacedModel, num_blocks: int, block_size: int) -> Proposer:
        return medusa.MedusaProposer(_loaded(outline, target, files.folder, packed))

    heads = _checked(outline, target, files)
    return Drafter(head_bytes(heads, packed), None, 0, 0, target.model.config.hidden_size, load)


def _eagle3(config: EngineConfig, target: PlacedModel) -> Drafter:
    files = HeadFiles(model_folder(config.speculation_model))
    packed = head_format(files.folder, config.weights, target.dtype, target.device)

    def outline(model: Decoder) -> tuple[eagle3.Eagle3Layer, Translate]:
        return eagle3.outlined_layer(files, model), eagle3.translate_layer

    def load(target: PlacedModel, num_blocks: int, block_size: int) -> Proposer:
        layer = _loaded(outline, target, files.folder, packed)
        layer.refuse_strange_ids()
        layer.make_rope(target.max_model_len)
        return _chain(config, layer, target, num_blocks, block_size)

    return _layer_drafter(_checked(outline, target, files), packed, target, load)


def _mtp(config: EngineConfig, target: PlacedModel) -> Drafter:
    folder, num_layers = target.folder, len(target.model.layers)
    stored = dict(outlined_weights(folder))
    mtp.refuse_without_layer(read_config(folder), set(stored), num_layers)
    packed = head_format(folder, config.weights, target.dtype, target.device)
    translate = partial(mtp.translate_layer, num_layers=num_layers)

    def outline(model: Decoder) -> tuple[mtp.MtpLayer, Translate]:
        return mtp.MtpLayer(model), translate

    def load(target: PlacedModel, num_blocks: int, block_size: int) -> Proposer:
        return _chain(config, _loaded(outline, target, folder, packed), target, num_blocks, block_size)

    with outlining(target.dtype):
        layer, _ = outline(target.model)
    filled(layer, stored.items(), translate, folder)
    return _layer_drafter(layer, packed, target, load)


Outlining = Callable[[Decoder], tuple[Any, Translate]]


def _checked(outline: Outlining, target: PlacedModel, files: HeadFiles) -> Any:
    """The outline of a head, whose files have what it needs."""
    with outlining(target.dtype):
        head, translate = outline(target.model)
    filled(head, files.outlines.items(), translate, files.folder)
    return head


def _loaded(outline: Outlining, target: PlacedModel, folder: Path, packed: WeightFormat | None) -> Any:
    with outlining(target.dtype):
        head, translate = outline(target.model)
    return loaded(head, iterate_weights(folder), translate, folder, packed, target.device)


def _chain(config: EngineConfig, layer: Any, target: PlacedModel, num_blocks: int, block_size: int) -> Proposer:
    cache = allocate(layer.kv_layout, 1, num_blocks, block_size, target.kv_dtype, target.device)
    return LayerChainProposer(layer, cache, block_size, *_kernels(config, target))


def _layer_drafter(layer: nn.Module, packed: WeightFormat | None, target: PlacedModel, load: Callable) -> Drafter:
    layout, size = layer.kv_layout, target.model.config.hidden_size
    linear = [module.out_features for module in layer.modules() if isinstance(module, Linear)]
    experts = [m.num_chosen * m.gate_up.shape[1] for m in layer.modules() if isinstance(m, MixtureOfExperts)]
    per_token = bytes_per_token(layout, 1, target.kv_dtype)
    return Drafter(head_bytes(layer, packed), layout, 1, per_token, max(linear + experts) + 4 * size, load)


def _kernels(config: EngineConfig, target: PlacedModel) -> tuple:
    """Attention and operations of a drafter's own: those of the target hold results of its step."""
    dtypes = target.device, target.dtype, target.kv_dtype
    attention = make_attention(config.attention_backend, *dtypes)
    attention.reserve(config.max_num_seqs, target.max_tokens + LayerChainProposer.MOST_LAGGING)
    return attention, make_operations(config.fused_operations, *dtypes)


def _check_vocabulary(folder: Path, target_folder: Path, size: int, target_size: int) -> None:
    """Raises ModelError where the two models do not mean the same tokens. Some of a family differ in padding only."""
    tokenizers = [_vocabulary(each) for each in (folder, target_folder)]
    same = tokenizers[0] == tokenizers[1] if all(tokenizers) else size == target_size
    if not same:
        raise ModelError(
            f"speculation_model {folder} has another vocabulary than the model ({size:,} and {target_size:,} tokens); "
            "a draft model must share the model's tokenizer"
        )


def _vocabulary(folder: Path) -> tuple[Any, Any] | None:
    content = read_json(folder, "tokenizer.json")
    if not content:
        return None
    added = {token.get("content"): token.get("id") for token in content.get("added_tokens") or []}
    return section(content, "model").get("vocab"), added
