"""The adapter of measured kernels: its traps, and what it refuses. Skipped without the package."""

import json

import pytest

pytest.importorskip("aiconfigurator_core")

from sojourn.metrics.compute.model_catalog import published_models
from sojourn.replay.device.estimate import Deployment, DeviceStep, OutsideTables
from sojourn.replay.device.measured_kernels import MOST_CONTEXT, MOST_DECODES, measured_kernels
from sojourn.replay.device.roofline import Roofline

LLAMA = "meta-llama/Meta-Llama-3.1-8B"


@pytest.fixture(scope="module")
def llama():
    return measured_kernels(Deployment(model=LLAMA, device="h100_sxm", weight_format="fp8"))


def test_a_chunk_costs_what_a_whole_prompt_of_its_past_says(llama):
    """The package divides a prompt's attention by its chunks; the adapter takes that back."""
    alone = llama.device_ns(DeviceStep(((512, 3584),), 0, 0)) / 1e6
    assert alone == pytest.approx(llama._handle.predict_prefill_latency(1, 4096, 3584), rel=0.02)


def test_a_folder_its_config_and_a_file_of_any_name_are_one_model(tmp_path):
    (folder := tmp_path / "mine").mkdir()
    for file in (folder / "config.json", tmp_path / "own.json"):
        file.write_text(json.dumps(published_models()["Llama-3.1-8B"]))
    step = DeviceStep(((512, 0),), 8, 8000)
    took = [
        measured_kernels(Deployment(model=name, device="h100_sxm")).device_ns(step)
        for name in ("Llama-3.1-8B", f"{folder}", f"{folder}/", f"{folder}/config.json", f"{tmp_path}/own.json")
    ]
    assert len(set(took)) == 1


def test_each_chunk_is_priced_by_its_own_past(llama):
    near, far = (llama.device_ns(DeviceStep(((512, past), (512, 0)), 8, 8000)) for past in (0, 15_000))
    assert far - near == pytest.approx(
        llama.device_ns(DeviceStep(((512, 15_000),), 0, 0)) - llama.device_ns(DeviceStep(((512, 0),), 0, 0)), rel=1e-6
    )


def test_decodes_read_the_context_that_they_have(llama):
    short, long = (llama.device_ns(DeviceStep((), 32, 32 * past)) for past in (1000, 32_000))
    kv_bytes = 131_072 / 1 * 32 * 31_000  # bf16 keys and values of 8 heads in 32 layers
    assert long - short == pytest.approx(kv_bytes / 3.35e12 * 1e9, rel=0.5)


@pytest.mark.parametrize(
    "step",
    [
        DeviceStep((), MOST_DECODES + 1, 10_000), DeviceStep((), 1, MOST_CONTEXT), DeviceStep(((16_385, 0),), 0, 0),
        DeviceStep(((100, MOST_CONTEXT),), 0, 0),
    ],
)  # fmt: skip
def test_steps_outside_of_the_tables_are_refused_not_extrapolated(llama, step):
    with pytest.raises(OutsideTables, match="outside of the tables: they have"):
        llama.device_ns(step)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "nobody/knows"}, "no kernels are known of a model 'nobody/knows'; give a folder"),
        ({"device": "l4"}, "no kernels are measured on 'l4'; measured are a100_sxm, h100_sxm"),
        ({"device": "h999"}, "no kernels are measured on 'h999'"),
        ({"backend": "sojourn"}, "as vllm, sglang and trtllm run them"),
        ({"weight_format": "int4"}, "GEMM perf data missing for quant 'int4_wo'"),
        ({"weight_format": "nvfp4"}, "needs 'fp4_tc_flops'"),
        ({"weight_format": "mxfp4"}, "weights of mxfp4 are not measured"),
        ({"kv_format": "fp4"}, "keys and values of fp4 are not measured"),
        ({"tensor_parallel": 3}, "should be divisible by tp_size 3"),
        ({"tensor_parallel": 16}, "they have 1 to 8"),
        ({"tensor_parallel": 4, "expert_parallel": 3}, "does not divide"),
        ({"model": "meta-llama/Meta-Llama-3.1-405B"}, "leaves no memory for keys and values"),
    ],
)
def test_what_the_tables_lack_is_refused_with_a_sentence(fields, says):
    with pytest.raises(OutsideTables, match=says) as refused:
        measured_kernels(Deployment(**{"model": LLAMA, "device": "h100_sxm", **fields}))
    assert "site-packages" not in str(refused.value)


def test_a_block_quantised_checkpoint_keeps_its_format():
    found = measured_kernels(
        Deployment(model="deepseek-ai/DeepSeek-V3", device="h200_sxm", tensor_parallel=8, weight_format="fp8")
    )
    assert found._modes["gemm_quant_mode"] == "fp8_block"


@pytest.mark.parametrize("model", ["Mixtral-8x7B-v0.1", "Mistral-7B-v0.3", "Llama-3.3-70B", "Qwen3-30B-A3B"])
def test_the_package_and_the_formulas_here_read_a_model_alike(model):
    """Its memory for keys and values is within a tenth, so that both have the same weights and the same KV."""
    deployment = Deployment(model=model, device="h200_sxm", tensor_parallel=4)
    kernels, roofline = measured_kernels(deployment), Roofline(deployment)
    assert kernels.kv_tokens == pytest.approx(roofline.kv_tokens, rel=0.1)
    step = DeviceStep(((2048, 0),), 32, 32_000)
    assert 1 < kernels.device_ns(step) / roofline.device_ns(step) < 6, "no kernel is faster than the peak rates"
