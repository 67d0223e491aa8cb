"""Who replays a run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Predictor
    from sojourn.metrics.run.directory import RunDirectory

MOST_REPLAYED_STEPS = 60_000  # of a run: a diagnosis replays it some thirty times, and is to take seconds


def predictor(run: "RunDirectory") -> "Predictor":
    """Who replays the run with its fixes, or says why it cannot be replayed."""
    from sojourn.metrics.errors import SojournError
    from sojourn.metrics.prediction import NoPredictor
    from sojourn.replay.predictor import predictor_of

    try:
        return predictor_of(run, most_steps=MOST_REPLAYED_STEPS)
    except SojournError as error:
        return NoPredictor(str(error))
