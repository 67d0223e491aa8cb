"""The rungs of a ladder: each changes what it says and nothing else, and the engine takes every one of them."""

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.options import check_settings
from sojourn.loadgen.scenario.scenario import load_scenario
from sojourn.loadgen.sweeps.ladder import LadderPlan, chosen_rungs, run_ladder, rungs, settings_of
from sojourn.metrics.compare.ladder import read_ladder, steps
from sojourn.metrics.errors import ExperimentError, InputError

QUIET = {"on_run": lambda *_: None, "progress": lambda _: None, "on_note": lambda _: None}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_rung_changes_its_own_setting_only(device):
    every = rungs(device)
    chosen = [settings_of(every, rung) for rung in every]
    for rung, below, here in zip(every[1:], chosen, chosen[1:], strict=False):
        changed = {name for name in here if here[name] != below.get(name)}
        assert changed == set(rung.on), rung.name
        assert {name: below[name] for name in rung.on} == rung.off
    assert all(set(settings) == set(chosen[0]) for settings in chosen)
    for settings in chosen if device == "cpu" else ():
        EngineConfig(model="tiny-model", **settings)


def test_the_bundled_scenario_takes_every_rung():
    scenario = load_scenario("ladder")
    for rung in rungs("cpu"):
        check_settings(scenario.engine, settings_of(rungs("cpu"), rung))


def test_rungs_are_chosen_by_name_and_keep_what_stands_below_them():
    every = rungs("cpu")
    chosen = chosen_rungs(every, "prefix cache, paged KV cache")
    assert [rung.name for rung in chosen] == ["paged KV cache", "prefix cache"]
    plan = LadderPlan(load_scenario("ladder"), every, chosen, 1, 1, "cpu", overrides={"threads": 1})
    assert plan.settings(chosen[1]) == settings_of(every, every[7]) | {"threads": 1}
    for names in ("paging", "prefix cache", "prefix cache,prefix cache"):
        with pytest.raises(InputError):
            chosen_rungs(every, names)


@pytest.mark.server
@pytest.mark.slow  # two experiments
def test_an_interrupted_ladder_goes_on_and_another_one_is_refused(tmp_path):
    scenario = load_scenario("ladder")
    short = scenario.model_copy(update={"arrivals": scenario.arrivals.model_copy(update={"duration_s": 1.5})})
    every = rungs("cpu")
    plan = LadderPlan(short, every, chosen_rungs(every, "overlap,prefix cache"), 1, 1, "cpu")

    def interrupt_second(number: int, of: int, rung: str) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ladder(plan, tmp_path / "l", **QUIET | {"on_run": interrupt_second})
    kept = read_ladder(tmp_path / "l").runs
    assert [run.rung for run in kept] == ["overlap"]
    found = run_ladder(plan, tmp_path / "l", **QUIET)
    assert found.runs[0] == kept[0] and [run.rung for run in found.runs] == ["overlap", "prefix cache"]
    step = steps(found)[1]
    assert step.multiplier > 0 and step.accounts_ms["compute.decode"] > 0
    with pytest.raises(ExperimentError, match="another ladder"):
        run_ladder(LadderPlan(short, every, plan.rungs, 2, 2, "cpu"), tmp_path / "l", **QUIET)
