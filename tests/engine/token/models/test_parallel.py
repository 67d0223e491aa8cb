"""A model spread over ranks gives the logits of one process, for every family and kind of parallelism."""

from pathlib import Path

import pytest
import torch

from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.techniques.lora.checkpoint.checkpoint import AdapterError, describe
from sojourn.engine.techniques.lora.checkpoint.fit import AdaptedModel
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.engine.token.quantise.checkpoint import quantise_checkpoint
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError
from tests.engine.adapters import LINEARS, random_adapter
from tests.engine.families import FAMILIES
from tests.engine.token.models.rank_logits import CPU, logits_of, several, with_adapters
from tests.engine.token.quantised.published import gptq, publish

TENSOR, PIPELINE, EXPERT = (ParallelLayout(*sizes) for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))
BOTH, STAGES = ParallelLayout(2, 2), ParallelLayout(1, 2, 2)
THREE, ALL = ParallelLayout(4, 1, 2), ParallelLayout(2, 2, 2)
# Tokens travel to the ranks of their experts. With four ranks some have no token of a step.
TRAVEL, FOUR, TRAVEL_STAGES = (ParallelLayout(1, *sizes, divides_tokens=True) for sizes in ((1, 2), (1, 4), (2, 2)))
WITH_EXPERTS = ("gpt-oss", "mixtral", "qwen3-moe", "qwen3-moe-some-layers", "deepseek-v2-lite", "deepseek-v2",
                "deepseek-v3", "deepseek-v3-other")  # fmt: skip


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Family → the logits of one process, and its number of parameters."""
    known = {}

    def of(name: str):
        if name not in known:
            model = load_model(checkpoints[name], torch.float32, CPU, None)
            known[name] = logits_of(model), model.num_parameters
        return known[name]

    return of


def families_for(layout: ParallelLayout) -> list[str]:
    if layout is FOUR:  # that eight experts can be divided by
        return ["qwen3-moe", "deepseek-v3"]
    if layout is BOTH:  # combines what is shown for each family alone
        return ["llama-biases", "llama-one-kv-head", "qwen3", "gemma3", "gpt-oss", "mixtral", "deepseek-v2", "mpt"]
    return list(WITH_EXPERTS if layout.expert_parallel > 1 else FAMILIES)


@pytest.mark.parametrize(
    "layout",
    [TENSOR, PIPELINE, EXPERT, BOTH, STAGES, THREE, ALL, TRAVEL, FOUR, TRAVEL_STAGES],
    ids=["tp2", "pp2", "ep2", "tp2-pp2", "pp2-ep2", "tp4-ep2", "all2", "ep2-travel", "ep4-travel", "pp2-ep2-travel"],
)
def test_ranks_give_the_logits_of_one_process(layout, checkpoints, expected, ranks):
    names = families_for(layout)
    by_rank = ranks.run(several, layout, [(name, checkpoints[name]) for name in names])
    for name in names:
        logits, parameters = expected(name)
        for rank, found in enumerate(by_rank):
            assert found[name][1] < parameters, "a rank holds a part"
            if layout.of_rank(rank).is_first_stage:
                # Sums in another order: a few units of the last place of logits of about 10.
                found_logits = torch.from_numpy(found[name][0])
                torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4, msg=f"{name}, rank {rank}")


@pytest.fixture(scope="module")
def quantised(checkpoints, tmp_path_factory):
    """Groups of 16 inputs, which the ranks' borders keep whole, and of 32, which they cut."""
    cases = {}
    for family, to, group in (
        ("qwen2", "w4a16", 16), ("qwen2", "w4a16", 32), ("qwen2", "awq", 32), ("qwen2", "int8", None),
        ("qwen2", "fp8", None), ("qwen2", "gguf-q8_0", None), ("mixtral", "w4a16", 16),
    ):  # fmt: skip
        folder = tmp_path_factory.mktemp("quantised") / "new"
        quantise_checkpoint(checkpoints[family], to, folder, group_size=group)
        cases[f"{family} {to} {group}"] = folder
    return cases


def check(by_rank, cases: dict[str, Path], weights: str | None, kernels: bool, tolerance: float) -> None:
    for name, folder in cases.items():
        model = load_model(folder, torch.float32, CPU, None, weights=weights)
        expected = logits_of(model, kernels=kernels)
        found = torch.from_numpy(by_rank[0][name][0])
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("layout", [TENSOR, ALL], ids=["tp2", "all2"])
def test_ranks_hold_their_parts_of_quantised_matrices(layout, quantised, ranks):
    cases = {name: folder for name, folder in quantised.items() if layout is TENSOR or name.startswith("mixtral")}
    check(ranks.run(several, layout, list(cases.items())), cases, None, False, 1e-4)


def test_kernels_of_quantised_matrices_multiply_by_parts(quantised, ranks):
    """Where groups stay whole the activations are rounded as in one process, so that only sums differ."""
    cases = {name: folder for name, folder in quantised.items() if name.endswith(" 16")}
    # An activation may be rounded to the neighbouring step: the logits are about 10.
    check(ranks.run(several, TENSOR, list(cases.items()), "auto", True), cases, "auto", True, 0.1)


@pytest.mark.parametrize("weights", ["auto", "int8", pytest.param("int4", marks=pytest.mark.compiler)])
def test_kernels_and_packed_weights_serve_a_stage(weights, checkpoints, ranks):
    """A stage rounds its matrices as one process does."""
    cases = {name: checkpoints[name] for name in ("qwen3", "llama3", "gemma2", "mixtral")}
    check(ranks.run(several, PIPELINE, list(cases.items()), weights, True), cases, weights, True, 1e-4)


def test_packed_weights_of_ranks(checkpoints, ranks):
    cases = {name: checkpoints[name] for name in ("qwen3", "gemma2", "mixtral", "deepseek-v3")}
    check(ranks.run(several, BOTH, list(cases.items()), "auto", True), cases, "auto", True, 1e-4)


@pytest.fixture(scope="module")
def adapted(checkpoints, tmp_path_factory):
    """Family → its checkpoint, and two adapters of unlike ranks: of every linear layer, and of some."""
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    targets = {"qwen3": LINEARS, "llama-one-kv-head": LINEARS, "mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"],
               "deepseek-v3": attention, "mixtral": LINEARS[:4]}  # fmt: skip
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for family, names in targets.items():
        made = [
            random_adapter(checkpoints[family], root / family / str(rank), rank, seed=rank, targets=some)
            for rank, some in ((3, names), (8, names[:2]))
        ]
        found[family] = checkpoints[family], made
    return found


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE, BOTH], ids=["tp2", "pp2", "tp2-pp2"])
def test_ranks_add_their_parts_of_adapters(layout, adapted, ranks):
    for kernels in (False, True):
        cases = {name: adapted[name] for name in (["qwen3"] if kernels else adapted)}
        alone = with_adapters(ONE_PROCESS, None, cases, kernels)
        by_rank = ranks.run(with_adapters, layout, cases, kernels)
        for name in cases:
            torch.testing.assert_close(*(torch.from_numpy(each[name][0]) for each in (by_rank[0], alone)),
                                       rtol=2e-4, atol=2e-4, msg=name)  # fmt: skip


def test_adapter_of_another_model_is_refused_by_the_stage_without_its_layer(adapted, checkpoints, tmp_path):
    """As by one process, so that it costs its own requests alone."""
    first = AdaptedModel(outlined_model(checkpoints["llama"], torch.float32, CPU, None, layout=PIPELINE).model)
    with pytest.raises(AdapterError, match="no linear layer of this model"):
        first.fitted(describe(adapted["mpt"][1][0]))


@pytest.mark.parametrize(
    ("family", "layout", "sentence"),
    [
        ("llama", ParallelLayout(3), "tensor_parallel=3 does not divide the model's 4 attention heads"),
        ("mpt-six-heads", ParallelLayout(4), "tensor_parallel=4 does not divide the model's 6 attention heads"),
        ("llama", ParallelLayout(1, 4), "pipeline_parallel=4 has more stages than the model has layers"),
        ("mixtral", ParallelLayout(1, 1, 4), "expert_parallel=4 does not divide the model's 6 experts"),
        ("llama", ParallelLayout(1, 1, 2), "expert_parallel=2 divides experts, and this model has none"),
        ("deepseek-v3", ParallelLayout(8), "tensor_parallel=8 does not divide the model's 4 attention heads"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_weights_are_read(family, layout, sentence, checkpoints):
    with pytest.raises(ModelError, match=sentence):
        outlined_model(checkpoints[family], torch.float32, CPU, None, layout=layout)


def test_an_order_of_inputs_cannot_be_shared(checkpoints, tmp_path):
    quantised, _ = publish(checkpoints["qwen2"], tmp_path, *gptq(activation_order=True))
    with pytest.raises(ModelError, match="desc_act"):
        outlined_model(quantised, torch.float32, CPU, None, weights="auto", layout=TENSOR)


def test_a_rank_reads_its_part_of_the_files(checkpoints):
    """Rows and columns alike: two ranks read the file once, but for what both hold."""
    folder, clocks = checkpoints["qwen3"], [StartupClock() for _ in range(3)]
    load_model(folder, torch.float32, CPU, None, startup=clocks[2])
    for rank in range(2):
        load_model(folder, torch.float32, CPU, None, startup=clocks[rank], layout=TENSOR.of_rank(rank))
    first, second, whole = (clock.startup().weight_bytes for clock in clocks)
    assert 0.5 * whole < first == second < 0.51 * whole  # norms are in both
