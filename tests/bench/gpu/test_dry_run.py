"""The engine on tensors without data: nothing mixes devices, waits, or compiles while it serves."""

import json
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:  # importing it here would settle that nobody interprets its kernels
    pytest.skip("needs triton", allow_module_level=True)

from bench.gpu.dry_run import Record, in_a_process
from bench.shapes import SHAPES
from tests.bench.gpu.shapes import LATENT, MIXTURE, SINKS

pytestmark = pytest.mark.compiler  # Triton builds its launchers with one

# Of a decode step of Qwen3, in a graph: lower them with each launch that goes. Qwen3-0.6B has 28 layers: 231.
LAYER_LAUNCHES, OTHER_LAUNCHES = 8, 7
SERVING = ("launch", "capture", "collect", "between")
FEW = {"max_num_seqs": 7, "max_num_batched_tokens": 64, "max_model_len": 1024}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Record:
    """Only its start: that has the graphs. All its layers are alike."""
    path = tmp_path_factory.mktemp("dry-run") / "config.json"
    path.write_text(json.dumps(SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 3}))
    return in_a_process(str(path), FEW, serves=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Record:
    """A dense layer and one of experts."""
    path = tmp_path_factory.mktemp("dry-run") / "config.json"
    path.write_text(json.dumps(MIXTURE))
    return in_a_process(str(path), FEW | {"max_num_batched_tokens": 700})


def test_no_operation_mixes_devices_and_nothing_waits_in_a_launch_or_a_capture(mixture):
    assert not [text for text in mixture.faults if text.startswith(tuple(f"[{phase}]" for phase in SERVING))]


def test_no_kernel_is_compiled_while_the_engine_serves(mixture):
    late = [kind for kind in mixture.specialisations.values() if kind["phase"] != "start"]
    assert not [(kind["kernel"], kind["first"], kind["signature"], kind["constants"]) for kind in late]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [LATENT, SINKS], ids=lambda shape: shape["architectures"][0])
def test_latents_and_sinks_wait_for_nothing_and_compile_nothing_late(shape, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    record = in_a_process(str(tmp_path / "config.json"), FEW | {"max_num_batched_tokens": 700})
    assert not [text for text in record.faults if text.startswith(tuple(f"[{phase}]" for phase in SERVING))]
    assert not [kind for kind in record.specialisations.values() if kind["phase"] != "start"]


def test_the_start_compiles_for_prompts_of_all_sizes_and_for_grammars(mixture):
    """Requests bring them later, in steps that no dry run takes."""
    kinds = [(kind["kernel"].split(":")[1], kind["constants"]) for kind in mixture.specialisations.values()]
    assert {constants["MASKED"] for name, constants in kinds if name == "edit_kernel"} == {False, True}
    assert {constants["ROWS"] for name, constants in kinds if name == "gate_up_kernel"} == {16, 32, 64, 128}
    assert {constants["ROWS"] for name, constants in kinds if name == "gated_product_kernel"} == {16, 32, 64}


def test_a_decode_step_launches_no_more_kernels_than_it_did(qwen3):
    graphs = {name: launches.total() for name, launches in qwen3.steps.items() if name.startswith("graph of")}
    assert set(graphs) == {"graph of 1", "graph of 2", "graph of 4", "graph of 7"}
    assert max(graphs.values()) <= 3 * LAYER_LAUNCHES + OTHER_LAUNCHES
    assert not qwen3.faults or all("decoder.py" in text for text in qwen3.faults), "the rope's tables are copied once"


def test_no_step_clears_blocks(mixture):
    """Attention masks what it loads behind a context."""
    assert not [
        name for name, launches in mixture.steps.items() if launches["aten.index_fill_"] and "penalty" not in name
    ]


def test_a_graph_is_replayed_by_every_step_of_decodes(mixture):
    decodes = [launches for name, launches in mixture.steps.items() if name.split(" with ")[0] == "decodes"]
    assert decodes and all(launches["graph replay"] == 1 for launches in decodes)
