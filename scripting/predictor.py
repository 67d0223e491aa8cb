"""Who replays a run."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Predictor
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.metrics.time_limit import TimeLimit

MOST_REPLAYED_STEPS = 60_000  # of a run: a diagnosis replays it some thirty times, and is to take seconds


def predictor(run: "RunDirectory", limit: "TimeLimit | None" = None) -> "Predictor":
    """Who replays the run with its fixes, within the limit if there is one, or says why it cannot be replayed."""
    from sojourn.metrics.errors import SojournError
    from sojourn.metrics.prediction import NoPredictor
    from sojourn.replay.predictor import predictor_of

    try:
        return predictor_of(run, most_steps=MOST_REPLAYED_STEPS, limit=limit)
    except SojournError as error:
        return NoPredictor(str(error))
