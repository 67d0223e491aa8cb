"""Exchanges between ranks give what a sum, a list or a copy of all ranks' tensors says."""

import pytest
import torch

from engine.compute.communication.communicator import SingleProcess
from engine.compute.communication.layout import ParallelLayout


def numbers(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank))


def exchange(layout, communicators):
    stage, me = communicators.stage, layout.rank_in_stage
    assert (stage.rank, stage.size) == (me, layout.ranks_per_stage)
    sent = [[1, 2], [0, 3]][me]
    return {
        "all_reduce": stage.all_reduce(numbers(me)),
        "narrow": stage.all_reduce(numbers(me).bfloat16()),
        "all_gather": stage.all_gather(numbers(me)),
        "reduce_scatter": stage.reduce_scatter(numbers(me)),
        "all_to_all": stage.all_to_all(numbers(me, 3), sent, [[1, 0], [2, 3]][me]),
        "broadcast": stage.broadcast(numbers(me), 1),
    }, communicators.counts()


def test_each_exchange_gives_what_the_tensors_of_all_ranks_say(ranks):
    both = [numbers(0), numbers(1)]
    rows = [numbers(0, 3), numbers(1, 3)]
    for rank, (found, counts) in enumerate(ranks.run(exchange, ParallelLayout(tensor_parallel=2))):
        assert torch.equal(found["all_reduce"], sum(both))
        assert torch.equal(found["narrow"], sum(each.bfloat16() for each in both))
        assert torch.equal(found["all_gather"], torch.stack(both))
        assert torch.equal(found["reduce_scatter"], sum(both)[2 * rank : 2 * rank + 2])
        assert torch.equal(found["all_to_all"], [rows[0][:1], torch.cat([rows[0][1:], rows[1]])][rank])
        assert torch.equal(found["broadcast"], both[1])
        assert counts["all_reduce"].calls == 2 and counts["all_reduce"].bytes == 48 + 24
        assert counts["all_gather"].bytes == 96 and all(count.nanoseconds > 0 for count in counts.values())


def ring(layout, communicators):
    """The first stage sends more than it waits for, and gets what the last one makes of it."""
    pipeline, last = communicators.pipeline, layout.pipeline_parallel - 1
    if layout.is_first_stage:
        for number in range(12):
            pipeline.send(torch.full((2,), float(number)), 1)
        return [pipeline.recv(torch.empty(2), last).tolist() for _ in range(12)]
    for _ in range(12):
        x = pipeline.recv(torch.empty(2), pipeline.rank - 1)
        pipeline.send(x * 10 + pipeline.rank, 0 if layout.is_last_stage else pipeline.rank + 1)
    return communicators.counts()["recv"].calls


def test_stages_pass_tensors_on_in_order_and_back(ranks):
    first, *others = ranks.run(ring, ParallelLayout(pipeline_parallel=3))
    assert first == [[100 * number + 12.0] * 2 for number in range(12)]
    assert others == [12, 12]


def fail(layout, communicators):
    if layout.rank == 1:
        raise ValueError("lost its part")
    communicators.stage.all_reduce(torch.zeros(1))


def test_a_rank_that_fails_is_named_and_later_runs_work(ranks):
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*lost its part"):
        ranks.run(fail, ParallelLayout(tensor_parallel=2))
    assert ranks.run(place, ParallelLayout(tensor_parallel=2)) == [0, 1]


def place(layout, communicators):
    return communicators.stage.rank


def test_one_process_exchanges_nothing():
    alone, x = SingleProcess(), numbers(0)
    assert alone.all_reduce(x) is x and alone.broadcast(x, 0) is x and alone.reduce_scatter(x) is x
    assert alone.all_gather(x).shape == (1, 4, 3) and alone.counts() == {}
