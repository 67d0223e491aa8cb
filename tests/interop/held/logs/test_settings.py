"""Flags, model configurations and sensors' texts say what they say, and nothing of what they do not."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.held.registry import read_held
from sojourn.metrics.errors import InputError

SHELL = "vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs 8 --no-enable-prefix-caching --api-key abc --seed=-1 | tee log"
RUN = "docker run --gpus all vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B \\\n  --max-num-seqs 8 && echo --done"
KUBERNETES = """\
containers:
- name: vllm
  image: vllm/vllm-openai:v0.10.1
  command: ["vllm", "serve"]
  args:
  - "Qwen/Qwen3-8B"
  - --max-num-seqs
  - "8"
  ports:
  - containerPort: 8000
"""
COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:latest
    command: >
      --model Qwen/Qwen3-8B
      --max-num-seqs 8
    ports: ["8000:8000"]
"""


@pytest.mark.parametrize("text", [SHELL, RUN, KUBERNETES, COMPOSE, f"bash -c '{SHELL.partition(' |')[0]}'"])
def test_flags_are_read_wherever_they_are_written(text):
    (held,) = read_held(text, "start")
    assert held.server == "vllm" and held.settings["max_num_seqs"] == 8
    assert held.settings["model"] == "Qwen/Qwen3-8B"
    assert not any("key" in name or "done" in name or "gpus" in name for name in held.settings)


def test_flags_have_values_of_their_type():
    (held,) = read_held(SHELL, "start")
    assert held.settings["tensor_parallel_size"] == 2 and held.settings["seed"] == -1
    assert held.settings["enable_prefix_caching"] is False and "the prefix cache is off" in held.notes[0]
    (llama,) = read_held("./llama-server -m x.gguf -c 32768 -np 4 -fa on", "start")
    assert llama.settings == {"model": "x.gguf", "ctx_size": 32768, "parallel": 4, "flash_attn": "on"}


def test_what_a_log_says_of_a_command_is_no_command():
    with pytest.raises(InputError):
        read_held("api_server.py:51: DeprecationWarning: `vllm serve` replaces it, see --help", "log")


BASE = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "torch_dtype": "bfloat16", "max_position_embeddings": 8192}  # fmt: skip
MLA = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168,
       "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "hidden_size": 2560, "sliding_window": 1024, "torch_dtype": "bfloat16",
         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}  # fmt: skip
NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "hidden_size": 2048, "full_attention_interval": 4, "torch_dtype": "bfloat16",
        "linear_conv_kernel_dim": 4}  # fmt: skip


@pytest.mark.parametrize(("config", "per_token", "windows"), [
    (BASE, 131_072, 0), (BASE | {"num_key_value_heads": None}, 524_288, 0), (MLA, 61 * 576 * 2, 0),
    (GEMMA, 2 * 2 * 4 * 256 * 2, 10 * 2 * 4 * 256 * 2 * 1024), (NEXT, 12 * 2 * 2 * 256 * 2, 0),
    ({"model_type": "gemma3", "dtype": "bfloat16", "text_config": GEMMA}, 2 * 2 * 4 * 256 * 2, 10 * 4096 * 1024),
    (BASE | {"model_type": "mistral", "sliding_window": 4096}, 0, 131_072 * 4096),
    (BASE | {"sliding_window": 4096, "use_sliding_window": False}, 131_072, 0),
])  # fmt: skip
def test_kv_bytes_of_a_token_by_the_kinds_of_layers(config, per_token, windows):
    (held,) = read_held(json.dumps(config), "config.json")
    assert held.settings["kv_bytes_per_token"] == per_token
    assert held.settings.get("kv_bytes_of_windows", 0) == windows


def test_a_note_says_how_many_tokens_a_gibibyte_holds():
    (held,) = read_held(json.dumps(BASE), "config.json")
    assert "1 GiB holds 8,192 tokens" in held.notes[0]


@pytest.mark.parametrize("change", [
    {"torch_dtype": None}, {"layer_types": ["odd"] * 32}, {"sliding_window": 512}, {"mamba_d_state": 16},
    {"num_hidden_layers": None, "hidden_size": 1},
])  # fmt: skip
def test_a_shape_that_is_not_known_gives_no_figure(change):
    (held,) = read_held(json.dumps(BASE | change), "config.json")
    assert "kv_bytes_per_token" not in held.settings and held.missing[0].startswith("KV bytes of a token:")


TABLE = """\
Tue Sep  1 19:10:20 2026
| NVIDIA-SMI 591.86                 Driver Version: 591.86         CUDA Version: 13.1     |
|   0  NVIDIA GeForce RTX 3090      WDDM  |   00000000:41:00.0  On |                  N/A |
|  0%   36C    P8             30W /  350W |    3545MiB /  24576MiB |     15%      Default |
"""
QUERY = """\
==============NVSMI LOG==============
Timestamp                                 : Sat May  9 03:38:32 2026
Attached GPUs                             : 1
GPU 00000000:00:04.0
    Clocks Event Reasons
        Idle                              : Not Active
        SW Power Cap                      : Active
    FB Memory Usage
        Used                              : 39000 MiB
    BAR1 Memory Usage
        Used                              : 1 MiB
    Utilization
        Gpu                               : 100 %
    Temperature
        GPU Current Temp                  : 62 C
        GPU Shutdown Temp                 : 92 C
    GPU Power Readings
        Average Power Draw                : N/A
        Instantaneous Power Draw          : 98.50 W
    Module Power Readings
        Average Power Draw                : 700.00 W
    Max Clocks
        SM                                : 1410 MHz
"""


def sensed(text):
    (held,) = read_held(text, "smi.txt")
    return {each.name: each.value for each in held.sensors}


def test_the_table_and_the_query_of_nvidia_smi_have_our_units():
    assert sensed(TABLE) == {"temperature": 36, "power": 30, "power_limit": 350, "memory_used": 3545 * 2**20,
                             "memory_total": 24576 * 2**20, "gpu_utilisation": 0.15}  # fmt: skip
    assert sensed(QUERY) == {"throttle": 4, "memory_used": 39000 * 2**20, "gpu_utilisation": 1, "temperature": 62,
                             "power": 98.5, "sm_clock_limit": 1410e6}  # fmt: skip


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([SHELL, RUN, KUBERNETES, COMPOSE, TABLE, QUERY, json.dumps(GEMMA)]), st.integers(0, 900),
       st.integers(0, 900), st.text(max_size=8))  # fmt: skip
def test_cut_and_mixed_texts_are_read_or_refused(text, begin, end, between):
    try:
        for held in read_held(text[:begin] + between + text[end:], "file"):
            assert held.missing or held.settings or held.sensors
    except InputError as error:
        assert str(error).startswith("file")


def test_heads_of_no_known_size_take_no_bytes_of_zero():
    config = {"model_type": "bart", "d_model": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
              "torch_dtype": "float32"}  # fmt: skip
    (held,) = read_held(json.dumps(config), "config.json")
    assert "kv_bytes_per_token" not in held.settings and "size of its heads" in held.missing[0]
