"""The steps of a recorded run as an estimate: of the run's own model, pool and time."""

import json

import msgspec
import numpy as np
import pytest

from sojourn.interop.probe.shape import shape_of
from sojourn.metrics.compute.model_catalog import config_of, find_model
from sojourn.metrics.compute.model_families import completed_text
from sojourn.metrics.compute.rank_shape import rank_shape
from sojourn.metrics.errors import ReplayError
from sojourn.replay.device.estimate import Deployment, DeviceStep
from sojourn.replay.device.recorded_steps import of_model, recorded_steps
from sojourn.replay.settings import recorded_config
from sojourn.replay.sizing.recorded import recorded_server
from sojourn.replay.steps_table import step_columns
from tests.metrics.synthetic import synthetic_run

MIXTURE = "Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return synthetic_run(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture
def described(recorded, monkeypatch):
    """The run with other sections in its run.json."""

    own = recorded.meta()

    def change(**sections):
        meta = own | sections
        monkeypatch.setattr(type(recorded), "meta", lambda run: json.loads(json.dumps(meta)))
        return recorded

    return change


def shape(model: str, degree: int = 1, **other):
    own = rank_shape(find_model(model), tensor_parallel=degree)
    own = msgspec.structs.replace(own, vocab_size=find_model(model).vocab_size)
    if "experts" in other and own.experts is not None:
        other["experts"] = msgspec.structs.replace(own.experts, **other["experts"])
    return msgspec.to_builtins(msgspec.structs.replace(own, **other))


LLAMA = rank_shape(find_model("Llama-3.1-8B"))
# Of 32 heads of queries, 8 of keys and values and 128 numbers each.
HEADS = LLAMA.attention_parameters // 80
OTHERS = {
    "layers": dict(windows=((None, 31),)),
    "width": dict(hidden_size=4096 + 64),
    "vocabulary": dict(vocab_size=128_000),
    "operations of heads": dict(pair_flops=LLAMA.pair_flops // 2),
    "weights of heads": dict(attention_parameters=LLAMA.attention_parameters - 8 * HEADS),
    "weights of feed-forward": dict(mlp_parameters=LLAMA.mlp_parameters // 14_336 * 13_824),
}  # fmt: skip


@pytest.mark.parametrize("size", OTHERS)
def test_a_model_that_differs_in_any_size_that_is_known_is_refused(described, size):
    asked = Deployment(model="Llama-3.1-8B", device="run")
    assert of_model(described(model_shape=shape("Llama-3.1-8B")), asked).model == "Llama-3.1-8B"
    with pytest.raises(ReplayError, match=f"another model than Llama-3.1-8B .*{size}"):
        of_model(described(model_shape=shape("Llama-3.1-8B", **OTHERS[size])), asked)


@pytest.mark.parametrize("experts", [{"num_experts": 64}, {"num_layers": 40}, {"num_chosen": 4}])
def test_a_mixture_of_other_experts_is_another_model(described, experts):
    asked = Deployment(model=MIXTURE, device="run")
    assert of_model(described(model_shape=shape(MIXTURE)), asked).model == MIXTURE
    with pytest.raises(ReplayError, match="experts"):
        of_model(described(model_shape=shape(MIXTURE, experts=experts)), asked)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", MIXTURE, "Gemma-3-27B", "tiny-mixture"])
def test_a_rank_and_a_probe_count_the_same_model(described, recorded, model):
    """A rank has its share of the heads; the probe counts by the sizes in the config alone."""
    engine = recorded.meta()["engine"] | {"tensor_parallel": 2}
    asked = Deployment(model=model, device="run", tensor_parallel=2)
    assert of_model(described(model_shape=shape(model, 2), engine=engine), asked).tensor_parallel == 2
    seen = msgspec.to_builtins(shape_of(completed_text(config_of(model))))
    assert of_model(described(model_shape=seen, engine=engine, probe={"engine": "vllm"}), asked).backend == "vllm"
    with pytest.raises(ReplayError, match="another model"):
        other = "Llama-3.1-70B" if model != "Llama-3.1-70B" else "Llama-3.1-8B"
        of_model(described(model_shape=seen, engine=engine, probe={"engine": "vllm"}), Deployment(
            model=other, device="run", tensor_parallel=2))  # fmt: skip


def test_a_run_without_sizes_is_known_by_the_name_of_its_model(described, recorded):
    engine = recorded.meta()["engine"] | {"model": "meta-llama/Llama-3.1-70B-Instruct"}
    run = described(model_shape=None, engine=engine)
    assert of_model(run, Deployment(model="Llama-3.1-70B", device="run"))
    with pytest.raises(ReplayError, match=r"its model is Llama-3.1-70B"):
        of_model(run, Deployment(model="Llama-3.1-8B", device="run"))


def test_the_pool_is_found_wherever_the_run_has_it(described, recorded):
    meta = recorded.meta()
    core = {name: value for name, value in meta.get("core", {}).items() if name != "num_kv_blocks"}
    engine = {name: value for name, value in meta["engine"].items() if name not in ("num_kv_blocks", "served")}
    size = recorded_config(meta).block_size
    for place in (
        {"core": core | {"num_kv_blocks": 321}, "engine": engine},
        {"core": core, "engine": engine | {"num_kv_blocks": 321}},
        {"core": core, "engine": engine | {"served": {"engine": {"num_kv_blocks": 321}}}},
        {"core": core, "engine": engine, "kv_events": {"pool_blocks": 321}},
    ):  # fmt: skip
        run = described(**place)
        steps, settings = recorded_server(run, Deployment(model="recorded", device="recorded"))
        assert steps.kv_tokens == recorded_steps(run).kv_tokens == 321 * size
        assert settings["num_kv_blocks"] == 321
    with pytest.raises(ReplayError, match="settings and blocks"):
        recorded_steps(described(core=core, engine=engine))


def test_all_steps_together_take_what_they_took(recorded):
    """With the host's part of their turns, and without."""
    rows = recorded.table("steps")
    rows = rows[(rows.new_tokens.map(len) > 0) & (rows.begin_ns >= recorded.requests().sent_ns.min())]
    plans = []
    for new, past in zip(rows.new_tokens, rows.past_tokens, strict=True):
        sequences = list(zip(map(int, new), map(int, past), strict=True))
        decodes = [past for new, past in sequences if new == 1]
        plans.append(DeviceStep(tuple(each for each in sequences if each[0] > 1), len(decodes), sum(decodes)))
    device, turn = (recorded_steps(recorded, with_host=each) for each in (False, True))
    took = sum(rows.device_ns)
    assert sum(map(device.device_ns, plans)) == pytest.approx(took, rel=1e-3)
    host = sum(map(np.sum, step_columns(rows, overlap=False).host_stages()))
    assert sum(map(turn.device_ns, plans)) - took == pytest.approx(host, rel=1e-3)
