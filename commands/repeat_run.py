"""A recorded run once more, with other settings: the proof of a prediction."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.commands.cli import need
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.loadgen.run.experiment import OnProgress
    from sojourn.metrics.run.directory import RunDirectory


def check_repeatable(run: "RunDirectory") -> None:
    """Raises SojournError where the run cannot be repeated here."""
    need("engine", "loadgen")
    from sojourn.loadgen.run.experiment import SCENARIO_FILE

    if not (run.path / SCENARIO_FILE).is_file() or not _given(run.meta()):
        raise InputError(
            f"{run.path} has no {SCENARIO_FILE} or no settings of our engine, so it cannot be repeated; record it with "
            "`sojourn run`"
        )


def repeat_run(
    run: "RunDirectory", settings: Mapping[str, Any], folder: Path, progress: "OnProgress" = lambda _: None
) -> "RunDirectory":
    """The same load against a server of ours with `settings` in the place of the recorded ones; it takes as long as
    the run did. A setting of None is taken back. Raises SojournError."""
    from sojourn.loadgen.run.experiment import SCENARIO_FILE, run_scenario
    from sojourn.loadgen.scenario.scenario import load_scenario
    from sojourn.replay.settings import with_chosen

    meta = run.meta()
    given = _given(meta)
    return run_scenario(
        load_scenario(run.path / SCENARIO_FILE), folder,
        engine_overrides=dict.fromkeys(given) | with_chosen(given, dict(settings)), seed=meta["seed"], processes=1,
        progress=progress,
    )  # fmt: skip


def _given(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the recorded run was started with, above those of its scenario."""
    from sojourn.engine.config import EngineConfig
    from sojourn.metrics.compare.settings import engine_of

    return {
        name: value
        for name, value in engine_of(dict(meta)).items()
        if name in EngineConfig.model_fields and name not in ("port", "run_dir") and not name.startswith("objective_")
    }
