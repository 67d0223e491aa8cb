"""Tokens by expert: those of a counted step are all that its routers chose, and other steps count nothing."""

import torch

from sojourn.engine.runner.expert_tokens import EVERY, summed
from tests.engine.harness import drain, hand_over, make_engine, submit


def test_counted_steps_have_every_choice_and_others_none(checkpoints):
    engine, published = make_engine(checkpoints["mixtral"])
    mixtures = [layer.mlp for layer in engine.runner.eager.model.layers]
    hand_over(engine, [submit("r0", list(range(3, 40)), EVERY + 4), submit("r1", [5] * 9, EVERY + 4)])
    drain(engine)
    counted = [place for place, record in enumerate(published.records) if record.expert_tokens]
    assert counted == list(range(0, len(published.records), EVERY)) and len(counted) == 2
    for place in counted:
        record = published.records[place]
        assert len(record.expert_tokens) == mixtures[0].num_experts
        assert sum(record.expert_tokens) == sum(record.new_tokens) * mixtures[0].num_chosen * len(mixtures)
        assert len(record.expert_imbalance_percent) == len(mixtures)
        assert all(100 <= percent <= 100 * mixtures[0].num_experts for percent in record.expert_imbalance_percent)


def test_imbalance_is_the_most_over_the_mean_layer_by_layer():
    assert summed([torch.tensor([3, 1, 0, 0]), torch.tensor([1, 1, 1, 1])]) == ([4, 2, 1, 1], [300, 100])
    assert summed([]) == ([], [])


def test_model_without_experts_has_no_counts():
    engine, published = make_engine("tiny-model")
    hand_over(engine, [submit("r0", [3, 4, 5], 2)])
    drain(engine)
    assert not any(record.expert_tokens or record.expert_imbalance_percent for record in published.records)
