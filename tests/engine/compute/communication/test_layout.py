"""Every layer, head, expert and token belongs to some rank, and a layout that cannot be is refused in a sentence."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sojourn.engine.compute.communication.layout import ParallelLayout, even_part
from sojourn.metrics.errors import ModelError

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(SIZES, SIZES, SIZES)
def test_ranks_cover_the_model_once(tensor, pipeline, expert):
    assume(tensor == 1 or tensor % expert == 0)
    ranks = [ParallelLayout(tensor, pipeline, expert, rank) for rank in range(pipeline * max(tensor, expert))]
    assert ranks[0].size == len(ranks) and ranks[0].of_rank(len(ranks) - 1) == ranks[-1]
    layers = [layer for rank in ranks if rank.rank_in_stage == 0 for layer in rank.stage_layers(17)]
    assert layers == list(range(17))
    stage = ranks[: ranks[0].ranks_per_stage]
    tokens = {token for rank in stage for token in rank.vocabulary(101)}
    assert tokens == set(range(101))
    parts = sorted(
        (part, inner)
        for rank in stage
        for part in even_part(24, rank.expert_parallel, rank.expert_rank, "expert_parallel", "experts")
        for inner in even_part(24, rank.ranks_per_expert, rank.rank_in_expert, "tensor_parallel", "columns")
    )
    assert parts == [(part, inner) for part in range(24) for inner in range(24)]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((0, 1, 1, 0), "tensor_parallel=0 must be at least 1"),
        ((2, 1, 4, 0), "expert_parallel=4 must divide tensor_parallel=2"),
        ((2, 2, 1, 4), "rank 4 is not one of the 4 ranks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(sizes, sentence):
    with pytest.raises(ModelError, match=sentence):
        ParallelLayout(*sizes)


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ModelError, match="tensor_parallel=3 does not divide the model's 4 attention heads"):
        ParallelLayout(3).tensor_part(4, "attention heads")
    with pytest.raises(ModelError, match="pipeline_parallel=4 has more stages than the model has layers"):
        ParallelLayout(1, 4).stage_layers(3)
    with pytest.raises(ModelError, match="leaves ranks without a part of the 5 tokens"):
        ParallelLayout(4, rank=3).vocabulary(5)
