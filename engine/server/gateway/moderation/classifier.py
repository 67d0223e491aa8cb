"""A classifier of another package, found by the entry point group `sojourn.moderators`, in threads or a process."""

import asyncio
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol

from sojourn.engine.server.gateway.moderation.verdict import Kind, ModerationFailed, Verdict
from sojourn.metrics.errors import InputError

GROUP = "sojourn.moderators"


class Classifier(Protocol):
    """What the factory of an entry point makes. `factory(settings)` gets the settings of the moderation file."""

    categories: Sequence[str]

    def classify(self, text: str, kind: Kind) -> Mapping[str, float]:
        """Category → score from 0 to 1. May take its time: it runs in a thread or a process of its own."""
        ...


def load_factory(name: str) -> Callable[[Mapping[str, Any]], Classifier]:
    """Raises InputError for a name that no installed package offers."""
    found = entry_points(group=GROUP)
    try:
        return found[name].load()
    except KeyError:
        known = ", ".join(sorted(found.names)) or "none is installed"
        raise InputError(f"no package offers the entry point {name!r} of {GROUP}: {known}") from None
    except Exception as error:  # foreign code
        message = f"the entry point {name!r} of {GROUP} cannot be loaded: {type(error).__name__}: {error}"
        raise InputError(message) from None


class ClassifierModerator:
    """Owns a classifier and the workers that it runs in.

    A check that takes too long fails, and its worker goes on: no thread can be stopped. A process that died is started
    again. Raises InputError where the classifier cannot be made.
    """

    def __init__(
        self,
        name: str,
        entry_point: str,
        *,
        settings: Mapping[str, Any],
        thresholds: Mapping[str, float],
        default_threshold: float = 0.5,
        timeout_seconds: float = 2.0,
        workers: int = 1,
        run_in: Literal["thread", "process"] = "thread",
        allows_on_failure: bool = False,
    ):
        self.name = name
        self.allows_on_failure = allows_on_failure
        self._timeout_seconds = timeout_seconds
        self._thresholds, self._default_threshold = thresholds, default_threshold
        self._entry_point, self._settings = entry_point, dict(settings)
        self._workers, self._run_in = workers, run_in
        factory = load_factory(entry_point)
        try:
            self._classifier = factory(self._settings)
            self.categories = tuple(self._classifier.categories)
        except Exception as error:  # foreign code
            message = f"{name}: the classifier {entry_point!r} cannot be made: {type(error).__name__}: {error}"
            raise InputError(message) from None
        if not self.categories:
            raise InputError(f"{name}: the classifier {entry_point!r} has no categories")
        self._executor = self._start()

    async def check(self, text: str, kind: Kind) -> Verdict:
        task = self._classifier.classify if self._run_in == "thread" else _classify
        try:
            async with asyncio.timeout(self._timeout_seconds):
                scores = await asyncio.get_running_loop().run_in_executor(self._executor, task, text, kind)
            scores = {category: float(scores.get(category, 0.0)) for category in self.categories}
        except TimeoutError:
            raise ModerationFailed(f"{self.name}: no verdict in {self._timeout_seconds} s") from None
        except Exception as error:  # foreign code
            if isinstance(error, BrokenProcessPool):
                self._executor.shutdown(wait=False)
                self._executor = self._start()
            raise ModerationFailed(f"{self.name}: {type(error).__name__}: {error}") from None
        default = self._default_threshold
        flagged = (category for category, score in scores.items() if score >= self._thresholds.get(category, default))
        return Verdict(frozenset(flagged), scores)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> Executor:
        if self._run_in == "thread":
            return ThreadPoolExecutor(self._workers, f"moderation {self.name}")
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, context, _make, (self._entry_point, self._settings))


_own: list[Classifier] = []  # of a worker process


def _make(entry_point: str, settings: Mapping[str, Any]) -> None:
    _own[:] = [load_factory(entry_point)(settings)]


def _classify(text: str, kind: Kind) -> Mapping[str, float]:
    return dict(_own[0].classify(text, kind))
