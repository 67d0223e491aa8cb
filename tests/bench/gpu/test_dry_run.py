"""The engine on tensors without data: nothing mixes devices, waits, or compiles while it serves."""

import json

import pytest

pytest.importorskip("triton")

from bench.gpu.dry_run import Record, in_a_process
from tests.bench.gpu.shapes import MIXTURE

LAUNCHES = 259  # of a decode step of Qwen3-0.6B, in a graph: lower it with each launch that goes
SERVING = ("launch", "capture", "collect", "between")
FEW = {"max_num_seqs": 7, "max_num_batched_tokens": 512, "max_model_len": 2048}


@pytest.fixture(scope="module")
def qwen3() -> Record:
    return in_a_process("qwen3-0.6b", FEW)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Record:
    path = tmp_path_factory.mktemp("dry-run") / "config.json"
    path.write_text(json.dumps(MIXTURE))
    return in_a_process(str(path), FEW)


@pytest.fixture(params=["qwen3", "mixture"])
def record(request) -> Record:
    return request.getfixturevalue(request.param)


def test_no_operation_mixes_devices_and_nothing_waits_in_a_launch_or_a_capture(record):
    assert not [text for text in record.faults if text.startswith(tuple(f"[{phase}]" for phase in SERVING))]


def test_no_kernel_is_compiled_while_the_engine_serves(record):
    late = [kind for kind in record.specialisations.values() if kind["phase"] != "start"]
    assert not [(kind["kernel"], kind["first"], kind["signature"], kind["constants"]) for kind in late]


def test_a_decode_step_launches_no_more_kernels_than_it_did(qwen3):
    graphs = {name: launches.total() for name, launches in qwen3.steps.items() if name.startswith("graph of")}
    assert set(graphs) == {"graph of 1", "graph of 2", "graph of 4", "graph of 7"}
    assert max(graphs.values()) <= LAUNCHES


def test_a_graph_is_replayed_by_every_step_of_decodes(qwen3):
    decodes = [launches for name, launches in qwen3.steps.items() if name.split(" with ")[0] == "decodes"]
    assert decodes and all(launches["graph replay"] == 1 for launches in decodes)
