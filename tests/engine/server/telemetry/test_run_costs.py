"""A recorded run holds what its costs are worked out from, and characters beside tokens."""

from pathlib import Path

import httpx
import msgspec
import pytest

from sojourn.engine.compute.cpp.extension import cache_folder
from sojourn.metrics.compute.cost_model import shape_from, step_cost, step_work
from sojourn.metrics.compute.roofline import Ceilings, Gemm, device_name, store_ceilings
from sojourn.metrics.compute.utilisation import arithmetic, ceilings_from, token_numbers, utilisation
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server_process import post, serving

pytestmark = pytest.mark.server

CEILINGS = Ceilings(
    device_name(), 2, "2026-11-21T00:00:00Z", {}, 1e10, 1e10, 2048, [Gemm("float32", 1, 1e9), Gemm("float32", 64, 2e11)]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[RunDirectory, dict[str, dict]]:
    """Of one server, and the answers by what was asked."""
    folder = tmp_path_factory.mktemp("costs")
    with pytest.MonkeyPatch.context() as patch:
        kernels = cache_folder()
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        store_ceilings(CEILINGS)
        cache_folder().symlink_to(kernels)  # else the server would compile them again: half a minute
        with serving(folder, "tiny-model", "--max-model-len", "512", "--run-dir", str(folder / "run")) as server:
            answers = {
                "text": post(server, prompt="Die Schlange, größer als 5 €", max_tokens=100).json(),
                "two texts": post(server, prompt=["one", "three"], n=2, max_tokens=7).json(),
                "ids": post(server, prompt=[5, 6, 7], max_tokens=3).json(),
            }
            body = {"model": "tiny-model", "messages": [{"role": "user", "content": "Hallo"}], "max_tokens": 9}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}) as response:
                response.read()
    return RunDirectory(folder / "run"), answers


def test_characters_are_those_of_the_texts(run):
    rows = run[0].table("requests").sort_values("arrived_ns")
    sent = [len("Die Schlange, größer als 5 €"), len("one") + len("three"), 0]
    assert rows.prompt_characters.tolist()[:3] == sent
    assert rows.prompt_characters.iloc[3] > len("Hallo")  # with the template around it
    written = [sum(len(choice["text"]) for choice in answer["choices"]) for answer in run[1].values()]
    assert rows.output_characters.tolist()[:3] == written and rows.output_characters.iloc[3] > 0


def test_costs_of_steps_can_be_worked_out_again_from_the_run(run):
    meta, steps = run[0].meta(), run[0].table("steps")
    shape = shape_from(meta)
    for row in steps.itertuples():
        cost = step_cost(shape, step_work(shape, row.new_tokens.tolist(), row.past_tokens.tolist(), row.logit_rows))
        assert (cost.flops, cost.moved_bytes) == (row.flops, row.bytes)
        assert (cost.attention, cost.mlp, cost.head) == (row.flops_attention, row.flops_mlp, row.flops_head)
        assert row.flops == row.flops_attention + row.flops_mlp + row.flops_head > 0


def test_a_run_holds_the_ceilings_of_its_device(run):
    meta, steps = run[0].meta(), run[0].table("steps")
    assert ceilings_from(meta) == CEILINGS and arithmetic(meta) == "float32"
    total = utilisation(steps, ceilings_from(meta), arithmetic(meta))[-1]
    assert total.flops == steps.flops.sum() and 0 < total.mfu_wall <= total.mfu_busy
    assert total.mfu_busy == pytest.approx(total.flops / 2e11 / (total.device_ns / 1e9))


def test_characters_a_token_are_told_where_all_was_text(run):
    requests = run[0].table("requests")
    numbers = token_numbers(run[0].table("steps"), requests)
    assert numbers.prompt_characters_per_token is None  # one prompt was sent as ids
    assert numbers.output_characters_per_token == requests.output_characters.sum() / requests.output_tokens.sum()


def test_a_run_of_an_older_version_has_no_shape(tmp_path: Path):
    assert shape_from({}) is None and ceilings_from({}) is None and arithmetic({}) is None
    with pytest.raises(msgspec.ValidationError):
        shape_from({"model_shape": {"vocab_size": 3}})
