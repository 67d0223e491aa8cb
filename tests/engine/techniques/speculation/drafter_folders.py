"""Tiny random drafters for the checkpoints of tests/engine/families.py, written in their published layouts, and what
each of them drafts by plain torch, over the whole sequence and without a cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.engine.families import FAMILIES, SIZES, random_model

HIDDEN, VOCAB, THETA = 64, 320, 10_000.0
HEAD_DIM, KNOWN_TOKENS, STATE_IDS = 16, 200, (0, 1, 3)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.2 + (1.0 if len(shape) == 1 else 0.0)


# Medusa: vLLM's layout, and that of FasterDecoding


def medusa_tensors(num_heads: int = 3, num_layers: int = 2) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = random_tensor(HIDDEN, HIDDEN)
            tensors[f"{head}.{layer}.linear.bias"] = random_tensor(HIDDEN)
        tensors[f"{head}.{num_layers}.weight"] = random_tensor(VOCAB, HIDDEN)
    return tensors


def write_medusa(folder: Path) -> Path:
    return write(folder, {"medusa_num_heads": 3, "medusa_num_layers": 2}, medusa_tensors())


def write_medusa_of_vllm(folder: Path) -> Path:
    """The same heads, of which each knows the first KNOWN_TOKENS of a permutation."""
    tensors, rows = {"token_map": token_map()}, token_map()
    for name, tensor in medusa_tensors().items():
        head, layer, *rest = name.split(".")
        if layer == "2":
            tensors[f"medusa_heads.lm_heads.{head}.weight"] = tensor[rows]
        else:
            tensors[f"medusa_heads.blocks.{head}.layers.{layer}.{rest[-1]}"] = tensor
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "truncated_vocab_size": KNOWN_TOKENS}
    return write(folder, {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2} | sizes, tensors)


def token_map() -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:KNOWN_TOKENS]


def medusa_drafts(target, known: list[int], count: int, rows: torch.Tensor | None = None) -> list[int]:
    tensors, drafts = medusa_tensors(), []
    hidden = target.model(torch.tensor([known[:-1]])).last_hidden_state[0, -1]
    for head in range(min(count, 3)):
        state = hidden
        for layer in range(2):
            weight, bias = (tensors[f"{head}.{layer}.linear.{kind}"] for kind in ("weight", "bias"))
            state = state + F.silu(F.linear(state, weight, bias))
        logits = F.linear(state, tensors[f"{head}.2.weight"])
        drafts.append(int(logits.argmax()) if rows is None else int(rows[logits[rows].argmax()]))
    return drafts


# EAGLE-3: the layout of speculators, and that of its authors


def eagle3_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {"fc.weight": random_tensor(HIDDEN, 3 * HIDDEN), "norm.weight": random_tensor(HIDDEN)} | {
        f"layers.0.{name}.weight": random_tensor(HIDDEN) for name in norms
    } | {
        f"layers.0.self_attn.{name}_proj.weight": random_tensor(rows, 2 * HIDDEN)
        for name, rows in (("q", 64), ("k", 32), ("v", 32))
    } | {
        "layers.0.self_attn.o_proj.weight": random_tensor(HIDDEN, 64),
        "layers.0.mlp.gate_proj.weight": random_tensor(80, HIDDEN),
        "layers.0.mlp.up_proj.weight": random_tensor(80, HIDDEN),
        "layers.0.mlp.down_proj.weight": random_tensor(HIDDEN, 80),
        "lm_head.weight": random_tensor(KNOWN_TOKENS, HIDDEN),
    }  # fmt: skip


def eagle3_layer_config() -> dict[str, Any]:
    return dict(
        hidden_size=HIDDEN, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=HEAD_DIM, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=512, rope_theta=THETA,
        vocab_size=VOCAB,
    )  # fmt: skip


def write_eagle3(folder: Path) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": KNOWN_TOKENS,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(STATE_IDS),
        "transformer_layer_config": eagle3_layer_config(),
    }
    offsets = token_map().sort().values - torch.arange(KNOWN_TOKENS)
    inverse = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, token_map(), True)
    return write(folder, config, eagle3_tensors() | {"d2t": offsets, "t2d": inverse})  # fmt: skip


def write_eagle3_of_its_authors(folder: Path) -> Path:
    """Another order around the residual, and the default states: of a target with 6 layers the second and third."""
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in eagle3_tensors().items()}
    offsets = token_map().sort().values - torch.arange(KNOWN_TOKENS)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": KNOWN_TOKENS,
              "eagle_aux_hidden_state_layer_ids": list(STATE_IDS)} | eagle3_layer_config()  # fmt: skip
    return write(folder, config, tensors | {"d2t": offsets})


def eagle3_drafts(target, known: list[int], count: int, norm_before_residual: bool) -> list[int]:
    tensors, tokens = eagle3_tensors(), token_map().sort().values
    last_stream: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, inputs: last_stream.append(inputs[0]))
    states = target(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    hook.remove()
    streams = [*states[:-1], *last_stream]
    state = F.linear(torch.cat([streams[index][0] for index in STATE_IDS], dim=-1), tensors["fc.weight"])
    ids = known[1:]
    for _ in range(count):
        embedded = target.model.embed_tokens.weight[torch.tensor(ids)]
        stream = _eagle3_layer(tensors, embedded, state, norm_before_residual)
        logits = F.linear(rms_norm(stream[-1], tensors["norm.weight"]), tensors["lm_head.weight"])
        ids = [*ids, int(tokens[logits.argmax()])]
        state = torch.cat((state, stream[-1:]))
    return ids[-count:]


def _eagle3_layer(tensors, embedded: torch.Tensor, state: torch.Tensor, norm_before_residual: bool) -> torch.Tensor:
    layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    normed = rms_norm(state, layer["hidden_norm.weight"])
    both = torch.cat((rms_norm(embedded, layer["input_layernorm.weight"]), normed), dim=-1)
    query, key, value = (
        F.linear(both, layer[f"self_attn.{name}_proj.weight"]).unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
        for name in "qkv"
    )
    mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True, enable_gqa=True)
    residual = normed if norm_before_residual else state
    residual = residual + F.linear(mixed.transpose(0, 1).flatten(1), layer["self_attn.o_proj.weight"])
    x = rms_norm(residual, layer["post_attention_layernorm.weight"])
    gated = F.silu(F.linear(x, layer["mlp.gate_proj.weight"])) * F.linear(x, layer["mlp.up_proj.weight"])
    return residual + F.linear(gated, layer["mlp.down_proj.weight"])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, HEAD_DIM]."""
    frequencies = 1 / THETA ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    angles = (torch.arange(x.shape[1])[:, None] * frequencies).repeat(1, 2)
    left, right = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()


# MTP: the third layer of a DeepSeek-V3 of transformers is the extra layer of one with two

MTP_FAMILY = "deepseek-v3"


def mtp_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    tensors = {"eh_proj.weight": random_tensor(HIDDEN, 2 * HIDDEN)}
    return tensors | {f"{name}.weight": random_tensor(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}


def three_layers():
    return random_model(MTP_FAMILY, num_hidden_layers=3)


def write_mtp(folder: Path) -> Path:
    three_layers().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    copies = {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
              "shared_head.head.weight": tensors["lm_head.weight"].clone()}  # fmt: skip
    tensors |= {f"model.layers.2.{name}": tensor for name, tensor in (mtp_tensors() | copies).items()}
    config = json.loads((folder / "config.json").read_text())
    return write(folder, config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, tensors)


def two_layers(whole):
    """The target by transformers."""
    import transformers

    family, differences = FAMILIES[MTP_FAMILY]
    config = getattr(transformers, f"{family}Config")(**(SIZES | differences))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.load_state_dict(whole.state_dict(), strict=False)
    return model


def mtp_drafts(whole, target, known: list[int], count: int) -> list[int]:
    tensors, eps = mtp_tensors(), target.config.rms_norm_eps
    state, ids = target.model(torch.tensor([known[:-1]])).last_hidden_state[0], known[1:]
    for _ in range(count):
        embedded = rms_norm(target.model.embed_tokens.weight[torch.tensor(ids)], tensors["enorm.weight"], eps)
        both = torch.cat((embedded, rms_norm(state, tensors["hnorm.weight"], eps)), dim=-1)
        x, places = F.linear(both, tensors["eh_proj.weight"])[None], torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
        angles = whole.model.rotary_emb(x, places)
        stream = whole.model.layers[2](x, attention_mask=mask, position_ids=places, position_embeddings=angles)
        stream = (stream[0] if isinstance(stream, tuple) else stream)[0]
        logits = target.lm_head(rms_norm(stream[-1], tensors["shared_head.norm.weight"], eps))
        ids, state = [*ids, int(logits.argmax())], torch.cat((state, stream[-1:]))
    return ids[-count:]


# name → (target, speculation, what writes the folder of what drafts)
DRAFTERS = {
    "draft model": ("llama", "draft-model", None),
    "medusa": ("llama", "medusa", write_medusa),
    "medusa of vllm": ("llama", "medusa", write_medusa_of_vllm),
    "eagle3": ("llama", "eagle3", write_eagle3),
    "eagle3 of its authors": ("llama", "eagle3", write_eagle3_of_its_authors),
    "mtp": ("mtp", "mtp", None),
}


def settings_of(name: str, checkpoints, root: Path) -> dict[str, str]:
    """Of an engine that drafts so; what drafts is written below `root`."""
    target, speculation, write = DRAFTERS[name]
    found = {"model": str(checkpoints[target] if target != "mtp" else once(root / "mtp", write_mtp))}
    if write is not None:
        found["speculation_model"] = str(once(root / name.replace(" ", "-"), write))
    elif speculation == "draft-model":
        found["speculation_model"] = str(checkpoints["qwen3"])
    return found | {"speculation": speculation}


def once(folder: Path, write: Callable[[Path], Path]) -> Path:
    return folder if folder.exists() else write(folder)
