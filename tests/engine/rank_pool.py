"""Processes that tests use as ranks: started once for a pytest session, from one process that has imported torch."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from sojourn.engine.compute.communication.layout import ParallelLayout

MOST_RANKS = 4
TIMEOUT_SECONDS = 60.0
MODULES = ["torch", "tests.engine.rank_pool", "sojourn.engine.token.models.registry",
           "sojourn.engine.compute.backends", "sojourn.engine.techniques.group.torch_distributed",
           "tests.engine.token.models.rank_logits"]  # fmt: skip


class RankPool:
    """`run` calls one function on every rank of a layout."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(MODULES)
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], layout: ParallelLayout, *args: Any) -> list[Any]:
        """function(layout of the rank, its communicators, *args) of each rank, in their order.

        Fails with the rank's traceback where one raises, and with its exit code where one dies.
        """
        while len(self._ranks) < layout.size:
            self._ranks.append(self._started())
        with TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._ranks[: layout.size]):
                pipe.send((function, layout.of_rank(rank), folder, args))
            return self._results(layout.size)

    def close(self) -> list[int]:
        """The exit codes of all ranks."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(TIMEOUT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process, _ in self._ranks]
        self._ranks = []
        return codes

    def _started(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _results(self, size: int) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:size])}
        results, errors, deadline = [None] * size, [], monotonic() + TIMEOUT_SECONDS
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank], error = pipe.recv()
                except EOFError:
                    process = self._ranks[rank][0]
                    process.join()
                    error = f"died with exit code {process.exitcode}"
                if error is not None:
                    errors.append(f"rank {rank}: {error}")
                    deadline = min(deadline, monotonic() + 2.0)  # the others wait for it in vain
        if errors or waiting:
            errors += [f"rank {rank} did not answer" for rank in waiting.values()]
            for process, _ in self._ranks:
                process.kill()
            self.close()
            raise AssertionError("\n".join(errors))
        return results


def _serve(pipe: Connection) -> None:
    """One rank, until the pool closes its pipe."""
    import torch

    from sojourn.engine.techniques.group.torch_distributed import connect

    torch.set_num_threads(1)
    while True:
        try:
            function, layout, folder, args = pipe.recv()
        except EOFError:
            return
        try:
            communicators = connect(layout, torch.device("cpu"), Path(folder), TIMEOUT_SECONDS)
            result = function(layout, communicators, *args)
            for each in communicators:  # a rank that closed at once would take back what it has just sent
                each.all_reduce(torch.zeros(1))
            communicators.close()
            pipe.send((result, None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
