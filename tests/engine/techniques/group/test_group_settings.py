"""The settings of a parallel group, and what its ranks compare."""

from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint
from sojourn.engine.request.micro_batches import MicroBatches
from sojourn.engine.request.plan import ScheduledTokens, StepPlan
from sojourn.engine.techniques.group.identity import difference, identity
from sojourn.engine.techniques.group.messages import Identity

REFUSED = {
    "one of the two has to be a multiple": {"tensor_parallel": 2, "expert_parallel": 3},
    "80 ranks": {"pipeline_parallel": 40, "expert_parallel": 2},
    "speculation=mtp drafts with parts of the model": {"tensor_parallel": 2, "speculation": "mtp"},
    "in host memory only yet": {"pipeline_parallel": 2, "kv_disk_path": "folder"},
    "between ranks that hold whole experts": {"tensor_parallel": 2, "expert_exchange": "all-to-all"},
    "between their layers, which no graph holds": {"pipeline_parallel": 2, "graphs": "on"},
    "the host counts the tokens": {"expert_parallel": 2, "expert_exchange": "all-to-all", "graphs": "on"},
}


@pytest.mark.parametrize(("sentence", "settings"), REFUSED.items(), ids=REFUSED)
def test_what_a_group_cannot_have_is_refused_with_a_sentence(sentence, settings):
    with pytest.raises(ValidationError) as raised:
        EngineConfig(model="tiny-model", **settings)
    assert sentence in complaint(raised.value)


def test_experts_share_the_ranks_of_their_stage():
    config = EngineConfig(model="tiny-model", tensor_parallel=4, expert_parallel=2, pipeline_parallel=2)
    assert config.num_ranks == 8
    assert EngineConfig(model="tiny-model", speculation="ngram").num_ranks == 1


def test_ranks_that_differ_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1" * 100)
    config = EngineConfig(model=str(tmp_path), tensor_parallel=2)
    ours: Identity = identity(config, tmp_path)
    assert difference(ours, identity(config, tmp_path)) is None
    assert "other settings" in difference(ours, identity(config.model_copy(update={"block_size": 8}), tmp_path))
    assert "other software" in difference(ours, replace(ours, version="python 2"))
    (tmp_path / "model.safetensors").write_bytes(b"2" * 100)
    assert "other weights" in difference(ours, identity(config, tmp_path))


@dataclass(eq=False)
class Sequence:
    name: str


def test_steps_under_way_hold_different_requests_and_their_share_of_the_decodes():
    requests = [Sequence(str(index)) for index in range(5)]
    batches = MicroBatches(2)
    first, prompts = batches.split(requests, [])
    assert (first, prompts) == (requests[:3], [])
    plan = planned(first)
    batches.planned(plan)
    second, _ = batches.split(requests, [])
    assert second == requests[3:] and batches.free(requests) == requests[3:]
    batches.planned(planned(second))
    assert batches.present(requests, plan) == first, "the other step's requests are not absent from this one"
    batches.committed(plan)
    assert batches.split(requests, [])[0] == first


def test_without_a_pipeline_nothing_is_restricted():
    requests, batches = [Sequence("a")], MicroBatches()
    batches.planned(planned(requests))
    assert batches.split(requests, requests) == (requests, requests) and batches.present(requests, None) is requests


def planned(requests: list[Sequence]) -> StepPlan:
    plan = StepPlan(8, 8)
    for request in requests:
        plan.add(ScheduledTokens(request, 1, 0, "decode", True))
    return plan
