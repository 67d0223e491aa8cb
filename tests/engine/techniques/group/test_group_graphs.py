"""Ranks of a group replay the graphs that rank 0 names. A CPU runs the captured work again, exchanges too."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import zmq

from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.config import EngineConfig
from sojourn.engine.loop.engine import Engine
from sojourn.engine.loop.scheduling import make_scheduler
from sojourn.engine.messages import Submit
from sojourn.engine.runner.forward import GraphForward
from sojourn.engine.runner.graphs import DecodeGraphs
from sojourn.engine.techniques.computing import computing
from sojourn.engine.techniques.group import messages
from sojourn.engine.techniques.group.follower import Follower
from sojourn.engine.techniques.group.rank_step import BetweenSteps, RankStep
from sojourn.engine.techniques.group.runner import GroupRunner, rank_runner
from sojourn.engine.telemetry.observer import make_observer
from sojourn.metrics.compute.startup import StartupClock
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.published import Published

pytestmark = pytest.mark.compiler  # the reference for attention needs lengths that a graph's host does not know
LENGTHS = (9, 30, 4, 17, 33)


class Told:
    """The other rank, which is told steps by a socket. Implements engine.techniques.group.rank_step.Ranks."""

    def __init__(self, layout: ParallelLayout, communicators: Communicators, socket: zmq.Socket):
        self.layout, self.communicators, self._socket = layout, communicators, socket
        self.graph_sizes: list[int | None] = []

    def agree(self, num_blocks: int) -> int:
        return num_blocks

    def send(self, work: RankStep | BetweenSteps) -> None:
        self.graph_sizes.append(work.graph_size)
        self._socket.send(messages.encode(work))

    def conclude(self) -> None:
        raise AssertionError("there is one stage")

    def take_reports(self) -> Sequence:
        return ()

    def loss(self) -> None:
        return None

    def close(self) -> None:
        self._socket.send(b"")


def run_again(work):
    work()
    return work


def requests() -> list[Submit]:
    drawn = [{"temperature": 0.8, "seed": 5}, *[{}] * len(LENGTHS)]  # the others are greedy
    return [
        submit(f"r{index}", list(range(3, 3 + length)), 6 + 3 * index, **drawn[index])
        for index, length in enumerate(LENGTHS)
    ]


def replayed(layout: ParallelLayout, communicators: Communicators, folder: Path, address: str, overlap: str):
    """Rank 0: tokens by request, and the graphs of its steps. The other rank computes what it is told."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH if layout.rank == 0 else zmq.PULL)
    socket.bind(address) if layout.rank == 0 else socket.connect(address)
    told = Told(layout, communicators, socket)
    config = EngineConfig(model=str(folder), tensor_parallel=2, threads=1, dtype="float32", num_kv_blocks=256,
                          max_model_len=512, overlap=overlap)  # fmt: skip
    runner, stages = rank_runner(config, folder, StartupClock(), computing(config, layout.rank), told)
    forward = runner.forward = GraphForward(runner.eager, config, draws=layout.rank == 0)
    with torch.inference_mode():
        forward.graphs = DecodeGraphs([1, 4, 8], runner.eager.tables.static, forward.decode, run_again)
    try:
        if layout.rank:
            follower = Follower(runner, stages)
            while encoded := socket.recv():
                follower.follow(messages.decode_to_rank(encoded))
            return None
        scheduler, published = make_scheduler(config, runner.memory.num_kv_blocks), Published()
        observer = make_observer(config, runner.shape, scheduler)
        group = GroupRunner(runner, stages, told)
        engine = Engine(scheduler, group, observer, published.take, overlap=runner.overlap)
        hand_over(engine, requests())
        drain(engine)
        engine.close()
        return published.tokens, told.graph_sizes
    finally:
        context.destroy(linger=1000)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_ranks_replay_the_graph_that_rank_0_names_and_give_the_tokens_of_one_process(
    ranks, checkpoints, tmp_path, overlap
):
    engine, expected = make_engine(checkpoints["llama"])
    hand_over(engine, requests())
    drain(engine)
    address = f"ipc://{tmp_path}/steps"
    found = ranks.run(replayed, ParallelLayout(2), checkpoints["llama"], address, overlap)
    tokens, sizes = found[0]
    assert tokens == expected.tokens
    assert sizes[0] is None and {1, 4, 8} == set(sizes[1:]), "prompts are in no graph"
