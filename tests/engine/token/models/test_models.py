"""What a model states about itself is what it does, and a checkpoint that cannot be served is refused in a sentence."""

import json
import shutil
import types
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.kv_cache import KVCache
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.layer import DecoderConfig
from sojourn.engine.token.models.registry import FAMILIES as ARCHITECTURES
from sojourn.engine.token.models.registry import decoder_config, load_model
from sojourn.engine.token.models.rope import rope_frequencies, rope_parameters
from sojourn.metrics.errors import ModelError
from tests.engine.compute.attention_inputs import attention_inputs
from tests.engine.families import FAMILIES, random_model
from tests.engine.harness import drain, hand_over, make_engine, submit

CPU = torch.device("cpu")
BLOCK = 16
KINDS = ("llama-biases", "gemma", "qwen2-windows", "mixtral", "qwen3-moe-some-layers", "deepseek-v2-lite",
         "deepseek-v3", "mpt")  # fmt: skip


def load(folder: Path, dtype=torch.float32, max_model_len: int | None = None):
    return load_model(folder, dtype, CPU, max_model_len)


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def cache_for(model, num_blocks: int) -> KVCache:
    layout = model.kv_layout
    size = (len(model.layers), layout.planes, num_blocks, BLOCK, layout.num_heads, layout.head_dim)
    return KVCache(torch.randn(size, dtype=model.norm.dtype))


def forward(model, past: int, new: int) -> torch.Tensor:
    """Logits of the last of `new` tokens after `past` ones whose keys and values are noise."""
    blocks = -(-(past + new) // BLOCK)
    positions = torch.arange(past, past + new)
    inputs = attention_inputs([new], [past + new], positions, torch.arange(blocks)[None], BLOCK)
    backend = TorchAttention()
    with torch.inference_mode():
        backend.begin(inputs)
        cache = cache_for(model, blocks)
        hidden = model(positions % 300 + 3, positions, inputs.slots, Operations(), backend, cache)
        return model.logits(hidden[-1:])


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_kv_pool_fills_the_free_memory_with_what_the_model_stores(family, checkpoints, monkeypatch):
    free = 40_000_000
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=free))
    engine, _ = make_engine(
        checkpoints[family], num_kv_blocks=None, max_num_seqs=4096, max_num_batched_tokens=512, memory_fraction=0.5
    )
    cache = engine.runner.eager.kv_cache
    block_bytes = cache.nbytes // engine.runner.memory.num_kv_blocks
    plan = engine.runner.memory
    # The tables of 4096 requests with penalties: counts, prompt and bias of 320 tokens, and their growth.
    assert plan.table_bytes == 4096 * 320 * (4 + 1 + 4) * 3 // 2
    free -= plan.weight_bytes + plan.work_bytes + plan.table_bytes
    assert free * 0.5 - block_bytes < cache.nbytes <= free * 0.5


def test_latent_attention_caches_one_latent_and_one_rotated_key(checkpoints):
    model = load(checkpoints["deepseek-v3"])
    config = read_config(checkpoints["deepseek-v3"])
    elements = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert model.shape().kv_bytes_per_token == 2 * elements * 4
    assert tuple(cache_for(model, 7).values.shape) == (2, 1, 7, BLOCK, 1, elements)


def test_router_stays_in_float32_and_the_rest_takes_the_dtype(checkpoints):
    model = load(checkpoints["deepseek-v3"], torch.bfloat16)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"layers.1.mlp.router", "layers.1.mlp.correction_bias"}
    assert forward(model, 0, 5).dtype == torch.float32


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_experts_in_one_tensor_are_read_like_one_tensor_each(family, checkpoints, tmp_path):
    random_model(family).save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(name.endswith("experts.gate_up_proj") for name in file.keys())  # noqa: SIM118
    merged, single = load(tmp_path), load(checkpoints[family])
    for (name, one), (_, other) in zip(merged.named_parameters(), single.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_layers_that_draft_further_tokens_are_left_out(checkpoints, tmp_path):
    folder = copy(checkpoints["deepseek-v3"], tmp_path)
    save_file({"model.layers.2.eh_proj.weight": torch.zeros(3, 3)}, folder / "model-draft.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    load(folder)


@pytest.mark.parametrize(
    "family", [name for name, (_, differs) in FAMILIES.items() if "rope_type" in differs.get("rope_parameters", {})]
)
@pytest.mark.parametrize("length", [512, 900])
def test_frequencies_equal_transformers(family, length):
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from tests.engine.families import SIZES

    kind, differences = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | differences))
    expected, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)
    ours, our_factor = rope_frequencies(config.to_dict(), 2 * len(expected), length)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor, rel=1e-12)


def test_dynamic_rope_beyond_the_models_length_is_that_of_transformers(checkpoints):
    from transformers import AutoModelForCausalLM

    folder, length = checkpoints["llama-dynamic"], 640
    prompt = [(7 * i) % 317 + 3 for i in range(length - 1)]
    engine, published = make_engine(folder, max_model_len=length, max_num_batched_tokens=200)
    hand_over(engine, [submit("r", prompt, 1, prompt_logprobs=0)])
    drain(engine)
    # Of a prompt of 640 tokens transformers rotates all with the base of 640, as we do for every length.
    ids = torch.tensor([prompt + published.tokens["r"]])
    with torch.inference_mode():
        exact = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[0].double().log_softmax(-1)
        )
    assert published.tokens["r"] == [exact[-2].argmax().item()]
    for position, told in enumerate(published.prompt_logprobs["r"]):
        assert told.logprob == pytest.approx(exact[position, told.token_id].item(), abs=2e-4)
    with pytest.raises(ModelError, match="max_model_len 1025 is above the model's own limit 1024; lower it"):
        load(folder, max_model_len=1025)


def test_gemmas_old_keys_say_the_same(checkpoints):
    config = read_config(checkpoints["gemma3"])
    new = decoder_config(config)
    rope = config.pop("rope_parameters")
    old = {"rope_theta": 50000.0, "rope_local_base_freq": 1e4, "rope_scaling": rope["full_attention"]}
    for key, length in (("rope", 512), ("window_rope", 512)):
        ours = rope_frequencies(getattr(decoder_config(config | old), key), 24, length)
        assert torch.equal(ours[0], rope_frequencies(getattr(new, key), 24, length)[0])
    assert not torch.equal(rope_frequencies(new.rope, 24, 512)[0], rope_frequencies(new.window_rope, 24, 512)[0])
    config.pop("layer_types")
    assert decoder_config(config | old | {"sliding_window_pattern": 2}).windows == (19, None, 19)
    assert decoder_config(config | old | {"num_hidden_layers": 7}).windows == (19,) * 5 + (None, 19)
    second = read_config(checkpoints["gemma2"])
    second.pop("layer_types")
    assert decoder_config(second).windows == (19, None, 19)


@pytest.mark.parametrize("published", [True, False])
def test_the_language_part_of_a_model_that_reads_images_is_served(published, checkpoints, tmp_path):
    """Published ones name it before `model.`, transformers 5 behind; the settings stand in text_config."""
    folder, text = copy(checkpoints["gemma3"], tmp_path), read_config(checkpoints["gemma3"])
    stored = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    front, image = ("language_model.model.", "vision_tower.") if published else (
        "model.language_model.", "model.vision_tower.")  # fmt: skip
    stored = {name.replace("model.", front, 1): tensor for name, tensor in stored.items()}
    save_file(stored | {f"{image}vision_model.head.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text | {"architectures": None},
              "vision_config": {"hidden_size": 3}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    alone = load(checkpoints["gemma3"])
    for (name, one), (_, other) in zip(load(folder).named_parameters(), alone.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_gpt_oss_has_a_window_in_every_second_layer_and_yarn_by_default(checkpoints):
    config = read_config(checkpoints["gpt-oss"])
    for key in ("layer_types", "rope_parameters", "sliding_window", "head_dim"):
        config.pop(key)
    built = decoder_config(config | {"original_max_position_embeddings": None})
    assert built.windows == (128, None, 128) and built.attention(None).rotary_dim == 64
    parameters = rope_parameters(built.rope)
    assert (parameters["rope_theta"], parameters["factor"], parameters["truncate"]) == (150_000.0, 32.0, False)


def test_experts_of_four_bits_are_read_as_transformers_reads_them(checkpoints, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = {}
    for path in checkpoints["gpt-oss"].glob("*.safetensors"):
        stored |= load_file(path)
    dice, four_bits, whole = torch.Generator().manual_seed(0), {}, {}
    for name, tensor in stored.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            size = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*size, 16), generator=dice).to(torch.uint8)
            scales = torch.randint(118, 124, size, generator=dice).to(torch.uint8)
            four_bits |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            whole[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        else:
            four_bits[name] = whole[name] = tensor
    models = []
    for kind, tensors, method in (("four", four_bits, {"quantization_config": {"quant_method": "mxfp4"}}),
                                  ("whole", whole, {})):  # fmt: skip
        folder = copy(checkpoints["gpt-oss"], tmp_path / kind, **method)
        for path in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
            path.unlink()
        save_file(tensors, folder / "model.safetensors")
        models.append(load(folder))
    torch.testing.assert_close(*(forward(model, 0, 9) for model in models), rtol=1e-5, atol=1e-5)


def test_old_rope_keys_say_the_same(checkpoints):
    config = read_config(checkpoints["llama-yarn"])
    parameters = config.pop("rope_parameters")
    old = config | {"rope_theta": parameters["rope_theta"], "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}  # fmt: skip
    new = config | {"rope_parameters": parameters}
    assert torch.equal(rope_frequencies(old, 16, 512)[0], rope_frequencies(new, 16, 512)[0])


@pytest.mark.parametrize(("family", "windows"), [("qwen2-windows", (None, 16)), ("qwen3-windows", (None, 33))])
def test_windows_of_published_configs_without_layer_types_begin_at_max_window_layers(family, windows, checkpoints):
    config = read_config(checkpoints[family])
    assert decoder_config(config).windows == windows
    config.pop("layer_types")
    assert decoder_config(config).windows == windows
    assert decoder_config(config | {"use_sliding_window": False}).windows == (None, None)


def test_code_that_a_checkpoint_brings_is_ignored(checkpoints, tmp_path):
    folder = copy(checkpoints["llama"], tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.EvilModel"})
    (folder / "modeling_evil.py").write_text("raise SystemExit('executed')")
    load(folder)


def copy(folder: Path, to: Path, **changes) -> Path:
    shutil.copytree(folder, to / "copy")
    (to / "copy" / "config.json").write_text(json.dumps(read_config(folder) | changes))
    return to / "copy"


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("llama", {"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported; supported are Llama"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is supported"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, which is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"num_hidden_layers": "three"}, "num_hidden_layers='three'; it must be a whole number of at least 1"),
        ("llama", {"num_key_value_heads": 3}, "4 attention heads, which 3 key and value heads do not divide"),
        ("llama", {"hidden_size": None}, "config.json lacks hidden_size"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps='small'; it must be a number"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "config.json lacks factor"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 0.5}}, "factor=0.5; it must be at least 1.0"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for each kind of layer"),
        ("llama", {"rope_parameters": ["yarn"]}, "rope_parameters=['yarn']; it must be an object"),
        ("llama-yarn", {"original_max_position_embeddings": "64"}, "original_max_position_embeddings='64'; it must be"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": float("inf")}},
            "factor=inf; it must be a number",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "beta_fast": []}}, "beta_fast=[]; it must be"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; it must be a number"),
        ("llama", {"head_dim": 7}, "7 dimensions of a head, which cannot be rotated in pairs"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act='relu'; only 'gelu_pytorch_tanh'"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation='relu'; only 'gelu_pytorch_tanh'"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation='relu'; only 'gelu_pytorch_tanh'"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping=0.0; it must be at least"),
        ("gemma2", {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar='256'; it must be a number"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0; only 7.0"),
        ("gpt-oss", {"num_experts_per_tok": 7}, "num_experts_per_tok=7, more than num_local_experts=6"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention; only causal"),
        ("gemma3", {"sliding_window": None}, "layers of sliding_attention, but no sliding_window"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "has them for each kind of layer"),
        ("qwen3-windows", {"layer_types": 2}, "layer_types=2; it must be a list"),
        ("qwen3-moe", {"mlp_only_layers": 2}, "mlp_only_layers=2; it must be a list"),
        ("qwen3-windows", {"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ("qwen3-windows", {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention' is not supp"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7, more than num_local_experts=6"),
        ("deepseek-v2", {"topk_method": "random"}, "topk_method='random'; supported are greedy and group_limited"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True; only False"),
        ("deepseek-v2-lite", {"attention_bias": True}, "attention_bias=True; only False"),
        ("deepseek-v2-lite", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, more than n_routed_experts=8"),
        ("deepseek-v3", {"topk_group": 9}, "topk_group=9"),
        ("deepseek-v3", {"n_group": 8, "topk_group": 8}, "n_group=8; a group is judged by two experts"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax'; only 'sigmoid'"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=False; only True"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln=True; only False"),
        ("mpt", {"attn_config": "alibi"}, "attn_config='alibi'; it must be an object"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale='inv_sqrt_d_model', which is not supported"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(family, changes, sentence, checkpoints):
    config = read_config(checkpoints[family]) | changes
    with pytest.raises(ModelError) as refused:
        decoder_config(config)
    assert sentence in str(refused.value)


def test_absent_keys_mean_what_transformers_takes_them_for(checkpoints):
    def without(family: str, key: str) -> DecoderConfig:
        config = read_config(checkpoints[family])
        config.pop(key)
        return decoder_config(config)

    assert rope_parameters(without("mixtral", "rope_parameters").rope)["rope_theta"] == 1e6
    assert rope_parameters(without("llama3", "rope_parameters").rope)["rope_theta"] == 1e4
    assert without("mistral", "sliding_window").windows == (4096, 4096)
    assert decoder_config(read_config(checkpoints["mistral"]) | {"sliding_window": None}).windows == (None, None)
    assert without("mixtral", "sliding_window").windows == (None, None)
    assert without("qwen3", "head_dim").attention(None).rotary_dim == 128
    assert without("qwen3-moe", "head_dim").attention(None).rotary_dim == 16  # hidden_size / num_attention_heads
    assert without("gemma", "head_dim").attention(None).rotary_dim == 256


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null"])
def test_file_that_is_no_object_is_refused_by_name(name, content, checkpoints, tmp_path):
    folder = copy(checkpoints["llama"], tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name} is not a JSON object"):
        load(folder)


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", [["LlamaForCausalLM"]], {"a": 1}, 3])
def test_architectures_are_a_list_of_names(architectures, checkpoints, tmp_path):
    folder = copy(checkpoints["llama"], tmp_path, architectures=architectures)
    with pytest.raises(ModelError, match=r"config.json has architectures=.*; it must be a list of names"):
        load(folder)


def test_refused_architecture_is_told_all_that_are_supported(checkpoints):
    with pytest.raises(ModelError) as refused:
        decoder_config(read_config(checkpoints["llama"]) | {"architectures": ["OtherForCausalLM"]})
    assert all(architecture in str(refused.value) for architecture in ARCHITECTURES)
