"""Weights, keys and values of published models are as many as their authors and the hub say."""

import json

import pytest

from sojourn.metrics.compute.memory_plan import memory_plan
from sojourn.metrics.compute.model_catalog import bundled_models, find_model, known_name, published_models
from sojourn.metrics.compute.model_sizes import model_sizes
from sojourn.metrics.compute.number_formats import kv_format, weight_format
from sojourn.metrics.compute.rank_shape import kv_bytes_of_sequence, kv_bytes_per_token, rank_shape, rank_weights
from sojourn.metrics.errors import InputError, ModelError

GIB = 2**30
# Numbers of weights as the hub counts them in safetensors (tied ones once); KV bytes of a token in bfloat16.
PUBLISHED = {
    "Llama-2-7B": (6_738_415_616, 512 * 1024),  # MHA
    "Llama-2-70B": (68_976_648_192, 320 * 1024),
    "Llama-3.2-1B": (1_235_814_400, 32 * 1024),
    "Llama-3.1-8B": (8_030_261_248, 128 * 1024),
    "Llama-3.1-70B": (70_553_706_496, 320 * 1024),
    "Llama-3.1-405B": (405_853_388_800, 516_096),  # DeepSeek-V3, ISCA 2025, table 1
    "Qwen2.5-0.5B": (494_032_768, 12 * 1024),
    "Qwen2.5-72B": (72_706_203_648, 327_680),  # ibid.
    "Qwen3-0.6B": (596_049_920, 112 * 1024),
    "Qwen3-4B": (4_022_468_096, 144 * 1024),
    "Qwen3-8B": (8_190_735_360, 144 * 1024),
    "Qwen3-32B": (32_762_123_264, 256 * 1024),
    "Qwen3-30B-A3B": (30_532_122_624, 96 * 1024),
    "Qwen3-235B-A22B": (235_093_634_560, 188 * 1024),
    "gpt-oss-20b": (20_914_757_184, 48 * 1024),
    "gpt-oss-120b": (116_829_156_672, 72 * 1024),
    "DeepSeek-V2-Lite": (15_706_484_224, 27 * 576 * 2),
    "DeepSeek-V2": (235_741_434_880, 60 * 576 * 2),
    "DeepSeek-V3": (671_026_419_200, 70_272),  # ibid., and 671 B in its report
    "Mixtral-8x7B-v0.1": (46_702_792_704, 128 * 1024),
    "Mixtral-8x22B-v0.1": (140_620_634_112, 224 * 1024),
    "Mistral-7B-v0.1": (7_241_732_096, 128 * 1024),
    "Mistral-Small-24B": (23_572_403_200, 160 * 1024),
    "Gemma-2B": (2_506_172_416, 18 * 1024),  # MQA
    "Gemma-7B": (8_537_680_896, 448 * 1024),
    "Gemma-2-2B": (2_614_341_888, 104 * 1024),
    "Gemma-2-9B": (9_241_705_984, 336 * 1024),
    "Gemma-2-27B": (27_227_128_320, 368 * 1024),
    "Gemma-3-1B": (999_885_952, 26 * 1024),
    "Phi-3-mini-4k": (3_821_079_552, 384 * 1024),
    "Phi-4": (14_659_507_200, 200 * 1024),
    "OPT-125M": (125_239_296, 36 * 1024),
    "GPT-2": (124_439_808, 36 * 1024),
    "MPT-7B": (6_649_286_656, 512 * 1024),
}
# Weights that a token is multiplied by, in billions, as the model cards round them.
ACTIVE = {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13, "Qwen3-235B-A22B": 22, "DeepSeek-V3": 37, "Kimi-K2": 32,
          "Mixtral-8x7B-v0.1": 12.9, "Qwen3-Coder-480B-A35B": 35, "Llama-4-Scout-17B-16E": 17}  # fmt: skip
DENSE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100,
         "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_and_keys_of_a_published_model(name):
    sizes = find_model(name)
    assert (sizes.parameters, kv_bytes_per_token(sizes)) == PUBLISHED[name]


def test_active_weights_are_those_of_the_model_cards():
    for name, billions in ACTIVE.items():
        assert find_model(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.06), name


def test_every_bundled_model_is_counted_and_its_memory_planned():
    for name in bundled_models():
        plan = memory_plan(find_model(name), 8 * 80 * GIB, length=2000)
        assert plan.weights.total > 0 and plan.lines[-1].unit == "requests", name


def test_a_share_of_free_memory_leaves_the_weights_whole():
    of_all, of_free = (
        memory_plan(find_model("Llama-3.1-8B"), 80 * GIB, utilisation=0.9, is_of_free=each) for each in (False, True)
    )
    taken = of_all.weights.total + of_all.activation_bytes + of_all.reserve_bytes
    assert of_all.pool_bytes == pytest.approx(0.9 * 80 * GIB - taken)
    assert of_free.pool_bytes == pytest.approx(0.9 * (80 * GIB - taken))


def test_packed_checkpoints_take_what_their_files_take():
    """Bytes of the published safetensors."""
    files = {"gpt-oss-20b": 13.76e9, "gpt-oss-120b": 65.25e9, "DeepSeek-V3": 673.2e9, "Llama-3.1-70B": 141.1e9}
    for name, size in files.items():
        assert rank_weights(find_model(name)).total == pytest.approx(size, rel=0.005), name
    awq = rank_weights(find_model("Llama-2-70B"), "awq").total
    assert awq == pytest.approx(36.6e9, rel=0.02)  # of the AWQ checkpoint


def test_a_rank_holds_its_share():
    sizes = find_model("Llama-3.1-70B")
    whole, half = rank_shape(sizes), rank_shape(sizes, tensor_parallel=2)
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert half.weight_bytes == pytest.approx(whole.weight_bytes / 2, rel=1e-3)
    assert kv_bytes_per_token(sizes, tensor_parallel=16) == kv_bytes_per_token(sizes, tensor_parallel=8)  # 8 KV heads
    latents = find_model("DeepSeek-V3")
    assert kv_bytes_per_token(latents, "fp8", 8) == 70_272 // 2  # each rank has all latents
    experts = rank_shape(latents, tensor_parallel=8, expert_parallel=8).experts
    assert experts is not None and experts.num_experts == 32 and experts.num_chosen == 1


def test_a_window_bounds_what_a_long_sequence_keeps():
    oss, each = find_model("gpt-oss-20b"), 2 * 8 * 64 * 2
    assert kv_bytes_of_sequence(oss, 10_000) == 12 * each * 10_000 + 12 * each * 128
    assert kv_bytes_of_sequence(oss, 100) == 24 * each * 100


def test_a_wrapper_is_its_language_part():
    text = {key: value for key, value in DENSE.items() if key not in ("architectures", "torch_dtype")}
    wrapper = {"architectures": ["SomeVisionForConditionalGeneration"], "torch_dtype": "float16", "text_config": text,
               "vision_config": {"hidden_size": 9}}  # fmt: skip
    found = model_sizes(wrapper)
    assert found.parameters == model_sizes(DENSE).parameters
    assert found.stored.name == "fp16" and found.is_language_part


@pytest.mark.parametrize(("said", "name", "shares"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", (1, 1)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", (1, 1)),
    ({"quant_method": "gptq", "bits": 8}, "int8", (1, 1)),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.0.self_attn*"]}, "nvfp4", (0.5, 1)),
    ({"quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*", "lm_head"],
      "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8", (0, 1)),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4", (0, 1)),
])  # fmt: skip
def test_quantisation_is_what_the_config_says(said, name, shares):
    stored = model_sizes(DENSE | {"quantization_config": said}).stored
    assert stored.name == name and (stored.shares["attention"], stored.shares["mlp"]) == shares


@pytest.mark.parametrize(("change", "sentence"), [
    ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "known are"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "a state of fixed size"),
    ({"index_topk": 2048}, "index_topk"),
    ({"vocab_size": None}, "lacks vocab_size"),
    ({"num_key_value_heads": 3}, "do not divide"),
    ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ({"torch_dtype": "int2"}, "known are"),
])  # fmt: skip
def test_what_cannot_be_counted_is_refused_with_what_is_known(change, sentence):
    with pytest.raises(ModelError, match=sentence):
        model_sizes(DENSE | change)


def test_a_name_is_found_without_owner_case_and_endings(tmp_path):
    assert known_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == known_name("llama-3.1-8b") == "Llama-3.1-8B"
    (tmp_path / "config.json").write_text(json.dumps(published_models()["Qwen3-8B"]))
    assert find_model(str(tmp_path)).parameters == find_model(str(tmp_path / "config.json")).parameters == 8_190_735_360
    with pytest.raises(InputError, match="did you mean Llama"):
        find_model("Llama-3.1-8")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="no JSON object"):
        find_model(str(tmp_path))


def test_formats_and_parallelism_are_refused_with_what_is_known():
    with pytest.raises(InputError, match="known are fp32, bf16"):
        weight_format("int3")
    with pytest.raises(InputError, match="known are bf16"):
        kv_format("int4")
    with pytest.raises(InputError, match="it can be 1, 2, 4, 8, 16, 32"):
        rank_shape(find_model("Llama-3.1-8B"), tensor_parallel=3)
    with pytest.raises(InputError, match="has no experts"):
        rank_shape(find_model("Llama-3.1-8B"), tensor_parallel=2, expert_parallel=2)
