"""The normal speed beside a run: which entries of the store stand in `run.json`."""

from sojourn.loadgen.run.speed import MOST_OTHER, _of_other_settings, measure_within
from sojourn.metrics.compute.speed_reference import SPEED_SETTINGS, SpeedEntry
from sojourn.metrics.time_limit import TimeLimit

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


def test_slow_measurements_end_with_their_time_limit_and_are_counted():
    """Each takes 4 s, or is ended when the time is over: the settings of the run are first, and a verdict waits 6 s."""
    now = [0.0]

    def slow(settings, within_s, seconds):
        took = min(within_s, 4.0)
        now[0] += took
        return entry(1, **settings) if took == 4.0 and seconds < 4 else None

    lacking = [{"threads": n} for n in range(5)]
    found, left_out = measure_within(TimeLimit(6.0, lambda: now[0]), slow, lacking)
    assert [each.settings["threads"] for each in found] == [0] and left_out == 4 and now[0] == 6.0
    found, left_out = measure_within(None, slow, lacking)
    assert len(found) == 5 and not left_out
