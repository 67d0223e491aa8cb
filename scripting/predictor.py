"""Who replays a run, where the engine is installed."""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Predictor
    from sojourn.metrics.run.directory import RunDirectory

REPLAY_NEEDS = ("xxhash",)  # of the engine extra: what replay imports
MOST_REPLAYED_STEPS = 60_000  # of a run: a diagnosis replays it some thirty times, and is to take seconds


def predictor(run: "RunDirectory") -> "Predictor | None":
    """Who replays the run with its fixes, or says why it cannot be replayed; None where the engine extra is not
    installed."""
    if any(importlib.util.find_spec(name) is None for name in REPLAY_NEEDS):
        return None
    from sojourn.metrics.errors import SojournError
    from sojourn.metrics.prediction import NoPredictor
    from sojourn.replay.predictor import predictor_of

    try:
        return predictor_of(run, most_steps=MOST_REPLAYED_STEPS)
    except SojournError as error:
        return NoPredictor(str(error))
