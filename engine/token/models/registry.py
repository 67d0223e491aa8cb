"""Which family reads which architecture. A new dense family is one short file and one line here."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.quantisation.devices import device_kernels
from sojourn.engine.compute.quantisation.kernels import Kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.online import online_formats
from sojourn.engine.compute.weight_formats import WeightFormat, has_bfloat16, weight_format
from sojourn.engine.token.checkpoint import read_config
from sojourn.engine.token.models import deepseek, gemma, gpt_oss, llama, mistral, mpt, qwen
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.keys import NotedKeys
from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.loading import fill, place_quantised
from sojourn.engine.token.models.moe import MixtureOfExperts
from sojourn.engine.token.models.settings import NEUTRAL, shown
from sojourn.engine.token.models.sources import WeightSource, has_own_head, weight_source
from sojourn.engine.token.models.weights import (
    SEED,
    fill_with_random_weights,
    random_matrix,
    stored_dtype,
)
from sojourn.engine.token.unread import unread_keys
from sojourn.metrics.compute.config_defaults import completed
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError

log = logging.getLogger(__name__)
ONLINE = ("int8", "int4", "fp8")  # formats that a dense checkpoint is rounded to
OF_ANOTHER_MODEL = 10  # times as many weights described as stored

FAMILIES: dict[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": llama.decoder_config,
    "MistralForCausalLM": mistral.decoder_config,
    "MixtralForCausalLM": mistral.mixtral_config,
    "Qwen2ForCausalLM": qwen.qwen2_config,
    "Qwen3ForCausalLM": qwen.qwen3_config,
    "Qwen3MoeForCausalLM": qwen.qwen3_moe_config,
    "GemmaForCausalLM": gemma.decoder_config,
    "Gemma2ForCausalLM": gemma.gemma2_config,
    "Gemma3ForCausalLM": gemma.gemma3_config,
    "Gemma3ForConditionalGeneration": gemma.gemma3_config,
    "GptOssForCausalLM": gpt_oss.decoder_config,
    "DeepseekV2ForCausalLM": deepseek.v2_config,
    "DeepseekV3ForCausalLM": deepseek.v3_config,
    "MptForCausalLM": mpt.decoder_config,
    "MPTForCausalLM": mpt.decoder_config,  # as mosaicml published it
}

_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
# Keys of NEUTRAL that some families compute with.
HONOURED = dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _SOFT_CAPS)


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    *,
    load_format: str = "auto",
    weights: str | None = None,
    window: tuple[int, int] | None = None,
    startup: StartupClock | None = None,
    layout: ParallelLayout = ONE_PROCESS,
    communicators: Communicators | None = None,
) -> Decoder:
    """Builds the model of a checkpoint folder and fills it: with its weights, or with `load_format`="dummy" with random
    ones, for which config.json is enough. `weights` packs them for float32 arithmetic on a CPU, as EngineConfig.weights
    says; None leaves them to torch. `window` narrows the attention: its tokens, and those of the sinks. `startup`
    learns how long reading took. A rank of `layout` gets its part of the model, which computes together with the other
    ranks by `communicators`. Raises ModelError with a sentence.

    Code that a checkpoint brings along (`auto_map`) is never run: an architecture is either in FAMILIES or refused.
    """
    dummy = load_format == "dummy"
    outline = outlined_model(
        folder, dtype, device, max_model_len, dummy=dummy, weights=weights, window=window, layout=layout
    )
    model = outline.model.to_empty(device=device).requires_grad_(False)
    model.tie()  # to_empty gave each its own memory
    if dummy:
        fill_with_random_weights(model, alike=layout.size > 1)
        _fill_quantised(model, outline.source)
    else:
        with torch.no_grad():
            stored = outline.source.weights(load_format, startup or StartupClock())
            fill(model, stored, outline.weight_format)
    if outline.weight_format is not None:
        model.pack(outline.weight_format)
    _say_what_is_dequantised(model, dtype)
    model.make_rope(outline.max_model_len, device)
    if communicators is not None:
        model.communicate(communicators)
    return model.eval()


def _say_what_is_dequantised(model: Decoder, dtype: torch.dtype) -> None:
    if model.checkpoint_format is None:
        return
    kept, total = model.num_kept_weights, model.num_matrix_weights
    if kept < total:
        dense = model.packed_format or str(dtype).removeprefix("torch.")
        log.warning(
            "%s checkpoint: %.0f%% of its matrices' weights are held in %s: they are dense there, or no kernel fits",
            model.checkpoint_format, 100 * (total - kept) / total, dense,
        )  # fmt: skip


def _fill_quantised(model: Decoder, weights: WeightSource) -> None:
    """Gives the layers that stay quantised random sources."""
    generator = torch.Generator().manual_seed(SEED)

    def source(module: str, outputs: int, inputs: int) -> QuantisedMatrix:
        return random_matrix(weights.outline(module, outputs, inputs), generator)

    if weights.name is not None:
        place_quantised(model, source)


class Outline(NamedTuple):
    """A model on the meta device: its parts without memory."""

    model: Decoder
    source: WeightSource
    weight_format: WeightFormat | None  # that its matrices will be packed in
    max_model_len: int

    @property
    def weight_bytes(self) -> int:
        """That its weights will take."""
        packed = self.weight_format
        return self.model.weight_bytes if packed is None else self.model.weight_bytes_in(packed)


def _has_experts(model: Decoder) -> bool:
    return any(isinstance(layer.mlp, MixtureOfExperts) for layer in model.layers)


def outlined_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    *,
    dummy: bool = False,
    weights: str | None = None,
    window: tuple[int, int] | None = None,
    layout: ParallelLayout = ONE_PROCESS,
) -> Outline:
    """What load_model will build, from config.json and the headers of the weights. Raises as load_model: also for a
    layout that the model's sizes do not allow."""
    config = read_config(folder)
    for sentence in unread_keys(folder):
        warn_once(sentence)
    parts, source = decoder_config(config), weight_source(folder, config)
    if not dummy and parts.tie_embeddings and has_own_head(source, parts.translate):
        parts = replace(parts, tie_embeddings=False)
    limit = max_model_len or parts.max_model_len
    if limit > parts.longest_model_len:
        raise ModelError(f"max_model_len {limit} is above the model's own limit {parts.longest_model_len}; lower it")
    with torch.device("meta"), _default_dtype(dtype):
        model = Decoder(parts, layout)
        if layout.expert_parallel > 1 and not _has_experts(Decoder(parts)):
            raise ModelError(f"expert_parallel={layout.expert_parallel} divides experts, and this model has none")
    if window is not None:
        model.narrow_attention(*window)
    if not dummy:
        _check_weights(model, folder, source)
    elif source.name is not None:
        place_quantised(model, source.outline)
    model.checkpoint_format = source.name
    model.choose_kernels(_kernels(weights, dtype, device))
    stored = named_dtype(config) if dummy or source.name is not None else stored_dtype(folder)
    packed = _format(weights, stored, dtype, device)
    if packed is not None and device.type == "cpu" and dtype == torch.float32:
        model.store_as(stored)
    return Outline(model, source, packed, limit)


def _check_weights(model: Decoder, folder: Path, source: WeightSource) -> None:
    """Raises ModelError, before memory is taken, where the headers of the weights do not fit the outline of a model."""
    weights = list(source.outlined())
    described = sum(parameter.numel() for parameter in model.parameters())  # of one rank: fewer
    stored = sum(tensor.numel() for _, tensor in weights)
    if described > OF_ANOTHER_MODEL * stored:  # to name the first tensor of them could take hours
        raise ModelError(
            f"config.json describes {described:,} weights, but the files of {folder} hold {stored:,}; "
            "they are of different models"
        )
    with torch.no_grad():
        fill(model, weights)


def _kernels(weights: str | None, dtype: torch.dtype, device: torch.device) -> Kernels:
    """Those for a quantised checkpoint that stays as it is; none where another format, or torch, takes its weights."""
    return device_kernels(device, dtype) if weights == "auto" else Kernels()


def _format(weights: str | None, stored: torch.dtype, dtype: torch.dtype, device: torch.device) -> WeightFormat | None:
    """What the matrices that are not quantised are packed as; None leaves them to torch. Raises ModelError."""
    computes_in = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    if weights is None:
        return None
    packs = device.type == "cpu" and dtype == torch.float32
    if packs:
        return weight_format(weights, stored)
    if weights in ONLINE:
        if (chosen := online_formats(device_kernels(device, dtype)).get(weights)) is None:
            raise ModelError(f"weights={weights} has no kernel here for {computes_in}; leave it out, or use another")
        return chosen
    if weights != "auto":
        raise ModelError(
            f"weights={weights} is for float32 arithmetic on a CPU, and this model computes in {computes_in}; "
            "leave it out, or set device=cpu and dtype=float32"
        )
    if device.type == "cpu" and dtype == torch.bfloat16 and not has_bfloat16():
        log.warning("dtype=bfloat16 is slow on this CPU, which has no instructions for it; float32 is several times "
                    "faster, and with weights=auto reads a bfloat16 checkpoint as it is")  # fmt: skip
    return None


def named_dtype(config: dict[str, Any]) -> torch.dtype:
    """The dtype that config.json says the weights have, by its old name or its new one; float32 where it does not."""
    name = config.get("dtype") or config.get("torch_dtype")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(name), torch.float32)


def decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """What config.json asks for, in our parts. Refuses by name what cannot be honoured."""
    architecture = config["architectures"][0]
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture} is not supported; supported are {', '.join(FAMILIES)}")
    config = completed(config)
    for key, neutral in NEUTRAL.items():
        if key not in HONOURED.get(architecture, ()) and config.get(key) is not None and config[key] != neutral:
            raise ModelError(f"config.json has {key}={config[key]!r}, which is not supported")
    noted = NotedKeys(config)
    parts = FAMILIES[architecture](noted)
    if unknown := noted.unknown(architecture):
        keys = ", ".join(f"{key}={shown(value)}" for key, value in unknown.items())
        warn_once(
            f"config.json has {keys}, which nothing here reads: if it changes what a model computes, outputs are wrong"
        )
    return parts


@cache
def warn_once(sentence: str) -> None:
    """A model is outlined for the plan of its memory, and again when it is loaded."""
    log.warning("%s", sentence)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters that name no dtype of their own get this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
