"""Replays of many changes at a time, in processes of their own where that is worth their start."""

import multiprocessing
from collections.abc import Sequence

from sojourn.engine.config import EngineConfig
from sojourn.metrics.interrupts import own_interrupts
from sojourn.metrics.prediction import Change
from sojourn.replay.simulate import Accident, Material, Replayed, Replayer

Job = tuple[Change, EngineConfig]
START_SECONDS = 6.0  # of processes: what takes less in one is not shared

_replayer: Replayer | None = None  # of a child


class ReplayProcesses:
    """Owns no process for longer than one call."""

    def __init__(self, material: Material, most: int) -> None:
        self._material, self._most = material, most

    def replay(
        self, replayer: Replayer, jobs: Sequence[Job], accidents: Sequence[Accident], seconds: float
    ) -> list[list[Replayed]]:
        """The outcomes of each job, one an accident; `seconds` is what one replay takes in this process."""
        expected = seconds * len(jobs) * len(accidents)
        if self._most > 1 and len(jobs) > 1 and expected > START_SECONDS:
            return self._spread(jobs, accidents)
        return [[replayer.replay(change, config, accident) for accident in accidents] for change, config in jobs]

    def _spread(self, jobs: Sequence[Job], accidents: Sequence[Accident]) -> list[list[Replayed]]:
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of pyarrow
        with own_interrupts():
            workers = context.Pool(min(self._most, len(jobs)), _begin, (self._material,))
        with workers as pool:
            return pool.starmap(_replay, [(change, dict(config), accidents) for change, config in jobs], chunksize=1)


def _begin(material: Material) -> None:
    global _replayer
    _replayer = Replayer(material)


def _replay(change: Change, settings: dict, accidents: Sequence[Accident]) -> list[Replayed]:
    assert _replayer is not None, "a child begins with `_begin`"
    config = EngineConfig.model_validate({name: value for name, value in settings.items() if value is not None})
    return [_replayer.replay(change, config, accident) for accident in accidents]
