"""A recorded run on another device: another run's machine, or a GPU of the tables."""

import json
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import msgspec
import pytest

from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.device.carried import carried_to, is_carried
from sojourn.replay.device.estimate import DeviceStep
from sojourn.replay.device.recorded_steps import RecordedSteps, recorded_deployment
from sojourn.replay.predictor import predictor_of
from tests.engine import simulated
from tests.replay.simulated_run import random_asks, write_run

needs_kernels = pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core")
ASKS = random_asks(3, 60, mean_gap_ns=12_000_000)


def recording(path, step_ns=1_000_000, token_ns=50_000):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "KnownSteps", partial(simulated.KnownSteps, step_ns=step_ns, token_ns=token_ns))
        return write_run(path, ASKS)


def changed(run, **meta):
    said = json.loads((run.path / "run.json").read_text())
    for section, values in meta.items():
        said[section] |= values
    (run.path / "run.json").write_text(json.dumps(said))
    return run


def test_a_run_carried_to_the_machine_of_another_run_is_that_run(tmp_path):
    fast = recording(tmp_path / "fast")
    slow = recording(tmp_path / "slow", step_ns=1_500_000, token_ns=150_000)
    predictor = predictor_of(fast)
    [said] = predictor.predict([Change(settings={"device": str(slow.path)})])
    was = predictor_of(slow).recorded
    for latency, found in (("ttft_ms", said.ttft_ms), ("tpot_ms", said.tpot_ms), ("e2e_ms", said.e2e_ms)):
        assert found["p50"].median == pytest.approx(was[f"{latency}:p50"], rel=0.03), latency
    assert said.tpot_ms["p50"].median > 1.4 * predictor.recorded["tpot_ms:p50"]
    assert not said.doubts


def test_another_run_of_another_model_is_refused(tmp_path):
    one, other = (recording(tmp_path / name) for name in ("one", "other"))
    changed(other, engine={"model": "another", "served": {}})
    with pytest.raises(ReplayError, match="other is of another model"):
        predictor_of(one).check(Change(settings={"device": str(other.path)}))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """A predictor of a run on an H100."""
    run = recording(tmp_path_factory.mktemp("gpu") / "run", step_ns=10_000_000)
    changed(
        run, hardware={"gpus": [{"name": "NVIDIA H100 80GB HBM3"}]}, core={"device": "cuda", "dtype": "bfloat16"},
        engine={"model": "Llama-3.1-8B", "overlap": "off", "served": {}},
    )  # fmt: skip
    return predictor_of(run)


@needs_kernels
def test_a_gpu_of_the_tables_is_as_much_faster_as_its_kernels(gpu):
    predictor = gpu
    same, faster, half = (
        Change(settings=settings)
        for settings in ({"device": "h100_sxm"}, {"device": "h200_sxm"}, {"weight_format": "fp8"})
    )
    of_same, of_half = predictor.predict([same, half], quick=True)
    [of_faster] = predictor.predict([faster])
    tpot = [each.tpot_ms["p50"].median for each in (of_same, of_faster, of_half)]
    assert tpot[0] == pytest.approx(predictor.recorded["tpot_ms:p50"], rel=0.02)
    assert 0.65 < tpot[1] / tpot[0] < 0.95, "of 3.35 and 4.8 TB/s"
    assert 0.5 < tpot[2] / tpot[0] < 0.95
    assert predictor.pool_tokens(faster) > 1.8 * predictor.pool_tokens(same), "141 GB hold more keys and values"
    assert "aiconfigurator-core" in predictor.hardware_sentence(faster)
    assert any("measured as vLLM runs them" in doubt for doubt in of_faster.doubts), "it is a run of our engine"
    bounds = of_faster.tpot_ms["p50"]
    assert bounds.low < 0.99 * bounds.median and bounds.high > 1.005 * bounds.median, "its error widens the interval"


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"device": "h300"}, "'h300' is no known device"),
        ({"device": "l4"}, "no kernels are measured on 'l4'"),
        ({"device": "h200_sxm", "weight_format": "int3"}, "'int3' is no known format"),
        ({"weight_format": "int4"}, "outside of the tables"),
        ({"tensor_parallel": 3, "device": "h200_sxm"}, "divisible by tp_size 3"),
        ({"tensor_parallel": 0, "device": "h200_sxm"}, "is no degree"),
        ({"device": "h200_sxm", "recorded_model": "nobody/knows"}, "of which no sizes are known"),
        ({"device": "h200_sxm", "dtype": "float16"}, "dtype changes how fast the device computes"),
    ],
)
def test_hardware_of_which_nothing_is_known_is_refused(gpu, settings, says):
    with pytest.raises(ReplayError, match=says):
        gpu.check(Change(settings=settings))


@needs_kernels
def test_a_vllm_that_the_probe_recorded_needs_no_more_than_its_degree(gpu):
    meta = gpu.run.meta() | {"probe": {"engine": "vllm"}}
    vllm = recorded_deployment(meta)
    change = Change(settings={"tensor_parallel": 2})
    assert is_carried(change, vllm) and not is_carried(change, recorded_deployment(gpu.run.meta()))
    own = RecordedSteps("run", gpu.material.times, 1000, vllm)
    carried = carried_to(change, own, None)
    assert (carried.before.deployment.tensor_parallel, carried.after.deployment.tensor_parallel) == (1, 2)
    assert carried.error.measurements > 8 and not carried.doubts()
    assert 0.4 < carried.ratio(DeviceStep((), 8, 8000)) < 0.9


def test_a_run_of_an_unknown_device_asks_which_it_was(tmp_path):
    run = recording(tmp_path / "run")
    with pytest.raises(ReplayError, match="give recorded_device beside it, one of a100_sxm"):
        predictor_of(run).check(Change(settings={"device": "h200_sxm"}))
    with pytest.raises(ReplayError, match="is no folder of a run"):
        predictor_of(run).check(Change(settings={"device": str(tmp_path)}))


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(600)
def test_a_run_on_two_cores_carried_to_one_core_is_the_run_on_one_core(tmp_path):
    """As closely as the error of both replays allows: that is what a noisy machine leaves."""
    for name, threads in (("two", 2), ("one", 1)):
        command = [sys.executable, "-m", "sojourn", "run", "steady-chat", "--duration", "25", "--output", name]
        subprocess.run([*command, "--set", f"threads={threads}"], cwd=tmp_path, check=True, capture_output=True)
    one = predictor_of(RunDirectory(tmp_path / "one"))
    [again] = one.predict([Change()])
    [said] = predictor_of(RunDirectory(tmp_path / "two")).predict([Change(settings={"device": str(tmp_path / "one")})])
    for latency in ("tpot_ms", "e2e_ms"):
        was = one.recorded[f"{latency}:p50"]
        of_two, of_one = getattr(said, latency)["p50"], getattr(again, latency)["p50"]
        low = of_two.low * of_one.low / of_one.median
        high = of_two.high * of_one.high / of_one.median
        assert low <= was <= high, f"{latency}: {was} is not within {low} to {high}"


@pytest.mark.parametrize(("dtype", "said", "kv"), [
    ("float32", None, "fp32"), ("float32", "auto", "fp32"), ("float16", None, "bf16"), ("bfloat16", "fp8_e4m3", "fp8"),
    ("float32", "bfloat16", "bf16"), (None, None, "bf16"),
])  # fmt: skip
def test_keys_and_values_have_the_format_of_the_activations_unless_another_is_said(dtype, said, kv):
    meta = {"core": {"dtype": dtype, "device": "cuda"}, "engine": {"model": "m", "kv_cache_dtype": said}}
    assert recorded_deployment(meta).kv_format == kv


@pytest.mark.parametrize(("backend", "order"), [("sglang", "prefill-first"), ("vllm", "mixed"), ("sojourn", "mixed")])
def test_steps_of_a_run_are_made_up_as_its_server_does(gpu, backend, order):
    deployment = msgspec.structs.replace(recorded_deployment(gpu.run.meta()), backend=backend)
    assert RecordedSteps("run", gpu.material.times, 1000, deployment).composition == order
