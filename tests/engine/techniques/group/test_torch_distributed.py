"""Exchanges between ranks give what a sum, a list or a copy of all ranks' tensors says."""

import time

import pytest
import torch

from sojourn.engine.compute.communication.communicator import SingleProcess, TransferTimes
from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.techniques.group.traffic import HiddenTimes


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
        return [pipeline.recv(torch.empty(2), last).wait().tolist() for _ in range(12)]
    for _ in range(12):
        x = pipeline.recv(torch.empty(2), pipeline.rank - 1).wait()
        pipeline.send(x * 10 + pipeline.rank, 0 if layout.is_last_stage else pipeline.rank + 1)
    return communicators.counts()["recv"].calls


def test_stages_pass_tensors_on_in_order_and_back(ranks):
    first, *others = ranks.run(ring, ParallelLayout(pipeline_parallel=3))
    assert first == [[100 * number + 12.0] * 2 for number in range(12)]
    assert others == [12, 12]


def overlapped(layout, communicators):
    """Stage 1 asks for a tensor, computes for 100 ms, and only then waits for it. Stage 0 sends it after 30 ms."""
    pipeline, rounds = communicators.pipeline, 3
    for number in range(rounds):
        pipeline.all_reduce(torch.zeros(1))  # both begin
        if layout.is_first_stage:
            time.sleep(0.03)
            pipeline.send(torch.full((3,), float(number)), 1)
            time.sleep(0.07)
        else:
            receipt = pipeline.recv(torch.empty(3), 0)
            time.sleep(0.1)
            assert receipt.wait().tolist() == [number] * 3
    return pipeline.take_times(), pipeline.counts(), pipeline.take_times()


def test_what_is_asked_for_early_arrives_behind_computation_and_the_time_is_measured(ranks):
    (sent, *_), (met, counts, none) = ranks.run(overlapped, ParallelLayout(pipeline_parallel=2))
    hidden_ms = [(end - begin) / 1e6 for begin, end in zip(sent.sent_ns, met.met_ns, strict=True)]
    assert len(hidden_ms) == 3 and max(hidden_ms) < 60, "not the 70 ms until it was wanted, but until it was there"
    assert counts["recv"].calls == 3 and counts["recv"].nanoseconds < 30e6
    assert none == ([], []) and not met.sent_ns and not sent.met_ns


def test_times_of_the_two_ends_of_a_tensor_are_paired_though_they_come_apart():
    hidden = HiddenTimes(ParallelLayout(pipeline_parallel=3))
    hidden.add(0, TransferTimes([100, 200], []))
    assert hidden.take() == {}
    hidden.add(1, TransferTimes([5000], [130]))  # what stage 1 sends to stage 2 is none of rank 0's
    assert hidden.take() == {"send": 30}
    hidden.add(2, TransferTimes([900], [5050]))
    hidden.add(0, TransferTimes([], [890]))
    hidden.add(1, TransferTimes([], [207]))
    assert hidden.take() == {"send": 7, "recv": 0}, "stage 0 stood waiting before the last stage had sent"


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
    assert alone.all_reduce(x) is x and alone.broadcast(x, 0) is x
    assert alone.all_gather(x).shape == (1, 4, 3) and alone.counts() == {}
