"""Measures what exchanges between two ranks take by size: gloo between processes of a CPU, NCCL between GPUs.

The second rank is a process of its own. What is timed is the Communicator that models use, with its own counter. The
median of the repeats counts, since a step has each exchange once. The longer of the two ranks' times is taken.
"""

import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from sojourn.engine.compute.communication.communicator import Communicator
from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.techniques.group.torch_distributed import connect
from sojourn.metrics.compute.link import POINT_TO_POINT, Link, LinkTime, fitted_link
from sojourn.metrics.errors import CalibrationError

RANKS = 2
WORK_BYTES = 1 << 12  # of the exchange behind it
TIMEOUT_SECONDS = 60.0


class Plan(NamedTuple):
    """What is measured."""

    sizes: tuple[int, ...] = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    repeats: int = 40  # of one size: fewer where it is long
    size_seconds: float = 0.3
    work_ns: tuple[int, ...] = (100_000, 300_000, 1_000_000)  # before an exchange: the parts of a small model's layers


CPU_PLAN = Plan()
CUDA_PLAN = Plan(sizes=(*CPU_PLAN.sizes, 1 << 24, 1 << 26))


class Measured(NamedTuple):
    """What one rank saw."""

    times: dict[str, list[LinkTime]]
    waits: list[tuple[float, float]]  # work before an all-reduce, and how much longer it took than without


def links(device: torch.device, threads: int, plan: Plan | None = None) -> list[Link]:
    """Of two ranks that share `threads`: some 10 s. [] where CUDA has one device only. Raises CalibrationError."""
    if device.type == "cuda" and torch.cuda.device_count() < RANKS:
        return []
    plan, threads = plan or (CUDA_PLAN if device.type == "cuda" else CPU_PLAN), max(1, threads // RANKS)
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="sojourn-links-") as folder:
        other = context.Process(target=_answer, args=(answers, device.type, folder, threads, plan), daemon=True)
        other.start()
        try:
            own = _measure(0, device.type, Path(folder), threads, plan)
            theirs = answers.get(timeout=TIMEOUT_SECONDS)
        except (RuntimeError, queue.Empty) as error:
            raise CalibrationError(f"two ranks could not exchange anything: {error}; run it again") from error
        finally:
            other.kill()
            other.join()
    transport = "nccl" if device.type == "cuda" else "gloo"
    found = []
    for collective, times in own.times.items():
        longer = [max(pair, key=lambda each: each.ns) for pair in zip(times, theirs.times[collective], strict=True)]
        # Of two ranks one comes first and waits: both together wait for the difference.
        waits = [] if collective == POINT_TO_POINT else own.waits + theirs.waits
        found.append(fitted_link(collective, transport, RANKS, longer, waits))
    return found


def _answer(answers: multiprocessing.Queue, kind: str, folder: str, threads: int, plan: Plan) -> None:
    answers.put(_measure(1, kind, Path(folder), threads, plan))


def _measure(rank: int, kind: str, folder: Path, threads: int, plan: Plan) -> Measured:
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    (folder / "stage").mkdir(exist_ok=True)
    (folder / "pipeline").mkdir(exist_ok=True)
    stage = connect(ParallelLayout(tensor_parallel=RANKS, rank=rank), device, folder / "stage", TIMEOUT_SECONDS)
    stages = connect(ParallelLayout(pipeline_parallel=RANKS, rank=rank), device, folder / "pipeline", TIMEOUT_SECONDS)
    try:
        with torch.inference_mode():
            times = _times(stage.stage, stages.pipeline, device, plan)
            return Measured(times, _waits(stage.stage, device, plan))
    finally:
        stage.close()
        stages.close()


def _times(stage: Communicator, pipeline: Communicator, device: torch.device, plan: Plan) -> dict[str, list[LinkTime]]:
    def ping_pong(x: torch.Tensor) -> None:
        if pipeline.rank == 0:
            pipeline.send(x, 1)
            pipeline.recv(x, 1).wait()
        else:
            pipeline.recv(x, 0).wait()
            pipeline.send(x, 0)

    def all_to_all(x: torch.Tensor) -> None:
        half = len(x) // RANKS
        stage.all_to_all(x, [half] * RANKS, [half] * RANKS)

    # An all-gather is counted with the bytes that it gives: each rank has half of them.
    exchanges: dict[str, tuple[Callable[[torch.Tensor], object], int, int]] = {
        "all_reduce": (stage.all_reduce, 1, 1),
        "all_gather": (stage.all_gather, RANKS, 1),
        "all_to_all": (all_to_all, 1, 1),
        POINT_TO_POINT: (ping_pong, 1, 2),
    }
    found = {}
    for name, (exchange, parts, ways) in exchanges.items():
        tensors = [torch.zeros(size // 4 // parts, device=device) for size in plan.sizes]
        found[name] = [
            LinkTime(size, _median_ns(exchange, x, stage, device, plan) / ways)
            for size, x in zip(plan.sizes, tensors, strict=True)
        ]
    return found


def _median_ns(
    exchange: Callable[[torch.Tensor], object], x: torch.Tensor, stage: Communicator, device: torch.device, plan: Plan
) -> float:
    """Of one call. Ranks begin each call at about the same moment, because the one before ended so."""
    exchange(x)  # connections are made at the first call
    first = torch.tensor([_timed_ns(exchange, x, device)], device=device)
    both_ns = float(stage.all_reduce(first))  # so that both ranks repeat it as often
    repeats = max(5, min(plan.repeats, round(plan.size_seconds * 1e9 / both_ns)))
    return statistics.median(_timed_ns(exchange, x, device) for _ in range(repeats))


def _timed_ns(exchange: Callable[[torch.Tensor], object], x: torch.Tensor, device: torch.device) -> float:
    begin = time.perf_counter_ns()
    exchange(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return float(time.perf_counter_ns() - begin)


def _waits(stage: Communicator, device: torch.device, plan: Plan) -> list[tuple[float, float]]:
    """Work as a model has it before each exchange: rank by rank it takes unequally long."""
    weight = torch.randn(512, 512, device=device)
    x = torch.zeros(WORK_BYTES // 4, device=device)
    rows = torch.randn(8, 512, device=device)
    alone = _median_ns(stage.all_reduce, x, stage, device, plan)
    one_ns = statistics.median(_timed_ns(lambda rows: rows @ weight, rows, device) for _ in range(50))
    found = []
    for work_ns in plan.work_ns:
        products = max(1, round(work_ns / one_ns))
        agreed = torch.tensor([float(products)], device=device)
        products = round(float(stage.all_reduce(agreed)) / RANKS)  # ranks do as much as each other

        def work(rows: torch.Tensor, products: int = products) -> None:
            for _ in range(products):
                rows @ weight

        worked, exchanged = [], []
        for _ in range(plan.repeats):
            worked.append(_timed_ns(work, rows, device))
            exchanged.append(_timed_ns(stage.all_reduce, x, device))
        found.append((statistics.mean(worked), _usual_mean(exchanged) - alone))
    return found


def _usual_mean(times: list[float]) -> float:
    """Without the slowest tenth: others on the machine held those up."""
    return statistics.mean(sorted(times)[: -len(times) // 10])
