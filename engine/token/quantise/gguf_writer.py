"""A dense model as a GGUF file, for this engine and for llama.cpp."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sojourn.engine.token.checkpoint import read_json
from sojourn.engine.token.gguf.config import ARCHITECTURES, KEYS
from sojourn.engine.token.gguf.tensors import NAMES
from sojourn.engine.token.gguf.tokenizer import CONTROL, SPLITS, USER_DEFINED
from sojourn.engine.token.models.settings import number
from sojourn.engine.token.text.template_sources import template_sources
from sojourn.metrics.errors import ModelError

# What else a rotation may have, and the values that a reader takes for absent ones.
YARN = {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "beta_fast": 32, "beta_slow": 1,
        "truncate": True}  # fmt: skip
NORMAL = 1  # of tokenizer.ggml.token_type
BLOCK = 32  # inputs of a block of these kinds


@dataclass(frozen=True, slots=True)
class KindOfBlocks:
    """One of ggml's kinds that its Python package can write."""

    name: str
    file_type: int  # general.file_type, llama.cpp's LLAMA_FTYPE
    embedding: str  # the kind of the table of embeddings, and of the head

    def back(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as a file gives it back."""
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(_blocks(weight, self.name), _kind(self.name))).reshape(weight.shape)


KINDS = {
    kind.name: kind
    for kind in (
        KindOfBlocks("F16", 1, "F16"),
        KindOfBlocks("Q8_0", 7, "Q8_0"),
        KindOfBlocks("Q5_0", 8, "Q8_0"),
        KindOfBlocks("Q4_0", 2, "Q8_0"),
        KindOfBlocks("Q4_1", 3, "Q8_0"),
    )
}


def write_gguf(path: Path, source: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], kind: str) -> None:
    """`tensors` by the names of the Hugging Face checkpoint `source`. Raises ModelError for what is not written."""
    import gguf

    architecture = {ours: name for name, ours in ARCHITECTURES.items()}.get(config["architectures"][0])
    if architecture is None:
        raise ModelError(
            f"{config['architectures'][0]} is not written as GGUF; written are {', '.join(ARCHITECTURES.values())}"
        )
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(source.name)
    writer.add_file_type(KINDS[kind].file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_config(writer, architecture, config)
    _add_tokenizer(writer, source, config)
    for name, tensor in tensors.items():
        ours = _gguf_name(name)
        values = _in_ggufs_order(tensor, ours, architecture, config)
        chosen = _kind_of(ours, values, kind)
        writer.add_tensor(ours, _blocks(values, chosen), raw_dtype=_kind(chosen))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(name: str) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[name]


def _blocks(values: torch.Tensor, kind: str) -> np.ndarray:
    from gguf.quants import quantize

    return quantize(np.ascontiguousarray(values.float().numpy()), _kind(kind))


def _kind_of(name: str, values: torch.Tensor, kind: str) -> str:
    """Norms and biases stay; rows that are no whole blocks take float16."""
    if values.dim() == 1:
        return "F32"
    if kind == "F16" or values.shape[1] % BLOCK:
        return "F16"
    return KINDS[kind].embedding if name in ("token_embd.weight", "output.weight") else kind


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    theirs = {ours: part for part, ours in NAMES.items()}
    if stem.startswith("model.layers."):
        number, part = stem.removeprefix("model.layers.").split(".", 1)
        if part in theirs:
            return f"blk.{number}.{theirs[part]}.{suffix}"
    elif stem in theirs:
        return f"{theirs[stem]}.{suffix}"
    raise ModelError(f"tensor {name} has no name in a GGUF file")


def _in_ggufs_order(tensor: torch.Tensor, name: str, architecture: str, config: dict[str, Any]) -> torch.Tensor:
    """llama.cpp rotates neighbours, so the rows of q and k of each head are reordered for it."""
    part = name.split(".")[-2]
    if architecture != "llama" or part not in ("attn_q", "attn_k"):
        return tensor
    heads = config["num_attention_heads"]
    heads = heads if part == "attn_q" else config.get("num_key_value_heads") or heads
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _add_config(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    for ours, key in KEYS.items():
        value = config.get(key)
        if value is not None and ours != "attention.layer_norm_rms_epsilon":
            writer.add_uint32(f"{architecture}.{ours}", value)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim") is not None:
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "yarn") or config.get("use_sliding_window"):
        what = "sliding windows" if config.get("use_sliding_window") else f"rope_type={kind}"
        raise ModelError(f"config.json has {what}, which is not written as GGUF here")
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    if kind != "default":
        writer.add_string(f"{architecture}.rope.scaling.type", kind)
        if lost := [key for key, plain in YARN.items() if rope.get(key) not in (None, plain)]:
            raise ModelError(f"config.json has {lost[0]} for its rotation, which is not written as GGUF here")
        writer.add_rope_scaling_factor(number(rope, "factor"))
        if rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_tokenizer(writer: Any, source: Path, config: dict[str, Any]) -> None:
    """As ggml's lists where it is a byte-level BPE, and whole, which this engine reads."""
    path = source / "tokenizer.json"
    if not path.is_file():
        return
    writer.add_string("tokenizer.huggingface.json", path.read_text(encoding="utf-8"))
    tokenizer, templates = read_json(source, "tokenizer.json"), template_sources(source)
    model = tokenizer.get("model") or {}
    if set(templates) == {"default"}:
        writer.add_chat_template(templates["default"])
    elif templates:
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates.items()])
    for role in ("bos", "eos", "pad"):
        token = config.get(f"{role}_token_id")
        if isinstance(token := token[0] if isinstance(token, list) and token else token, int):
            writer.add_uint32(f"tokenizer.ggml.{'padding' if role == 'pad' else role}_token_id", token)
    if model.get("type") == "BPE" and not model.get("byte_fallback"):
        _add_lists(writer, tokenizer, config["vocab_size"])


def _add_lists(writer: Any, tokenizer: dict[str, Any], size: int) -> None:
    model = tokenizer["model"]
    added = {token["id"]: token for token in tokenizer.get("added_tokens") or []}
    names = {index: token for token, index in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    tokens = [names.get(index, f"[PAD{index}]") for index in range(size)]
    kinds = [(CONTROL if added[index].get("special") else USER_DEFINED) if index in added else NORMAL
             for index in range(size)]  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])


def _split(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of how texts are split before merges."""
    text = str(tokenizer.get("pre_tokenizer"))
    return next((name for name, pattern in SPLITS.items() if repr(pattern)[1:-1] in text), "gpt-2")
