"""The normal speed beside a run: which entries of the store stand in `run.json`."""

from sojourn.loadgen.run.speed import MOST_OTHER, _of_other_settings
from sojourn.metrics.compute.speed_reference import SPEED_SETTINGS, SpeedEntry

OWN = dict.fromkeys(SPEED_SETTINGS, "auto") | {"threads": 1, "weights": "float32"}


def entry(number: int, **settings) -> SpeedEntry:
    return SpeedEntry(
        name=str(number), identity=number, measured_at="", settings=OWN | settings, step_ns=[1.0], steps=99
    )


def test_many_runs_of_one_other_setting_leave_room_for_each_other_format():
    crowd = [entry(n, threads=n, dtype="bfloat16", weights="bfloat16") for n in range(2, 30)]
    measured, newer = entry(1, weights="int8"), entry(40, weights="int8")
    found = _of_other_settings([measured, *crowd, newer, entry(41), *[crowd[0]] * 9], OWN)
    assert len(found) == MOST_OTHER and found[-1] is newer and measured not in found
    assert all(each.settings != OWN for each in found) and len({repr(each.settings) for each in found}) == MOST_OTHER
