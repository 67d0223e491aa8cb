"""Every nanosecond of a core's start is in exactly one phase."""

import random

import msgspec
import pytest

from sojourn.metrics.compute.startup import PHASES, TIERS, Startup, StartupClock, startups_of


class Clock:
    """Time that only passes between two looks, by a drawn amount."""

    def __init__(self, seed: int):
        self._draw = random.Random(seed)
        self.now_ns = 10**12

    def __call__(self) -> int:
        self.now_ns += self._draw.randint(0, 10**9)
        return self.now_ns


def spend(startup: StartupClock, draw: random.Random, depth: int = 0) -> int:
    """Drawn phases within phases; the bytes that were read in them."""
    read = 0
    for _ in range(draw.randint(1, 4)):
        choice = draw.random()
        if choice < 0.3:
            startup.enter(draw.choice(list(PHASES)))
        elif choice < 0.6 and depth < 3:
            with startup.phase(draw.choice(list(PHASES))):
                read += spend(startup, draw, depth + 1)
        else:
            size = draw.randint(1, 1 << 30)
            with startup.reading(draw.choice(TIERS), size):
                read += size
    return read


@pytest.mark.parametrize("seed", range(40))
def test_the_phases_of_a_start_sum_to_it_and_its_bytes_are_all_counted(seed):
    clock, draw = Clock(seed), random.Random(seed)
    wanted_ns = clock()
    spawned_ns, first_line_ns, imported_ns = clock(), clock(), clock()
    startup = StartupClock.of_process(wanted_ns, spawned_ns, first_line_ns, imported_ns, clock)
    read = spend(startup, draw)
    found = startup.startup().until(clock())
    assert (found.begin_ns, found.end_ns) == (wanted_ns, clock.now_ns)
    assert found.unaccounted_ns == 0 and min(found.phases_ns.values()) >= 0
    assert found.weight_bytes == read
    assert not found.spared_ns, "it was started because it was wanted"


@pytest.mark.parametrize(
    ("wanted_ns", "own", "spared"),
    [
        (100, {"process": 20, "imports": 70}, {}),
        (110, {"process": 20, "imports": 70}, {}),  # at the moment of its start
        (125, {"process": 5, "imports": 70}, {"process": 15}),  # while its interpreter started
        (150, {"imports": 50}, {"process": 20, "imports": 20}),
        (500, {}, {"process": 20, "imports": 70}),  # a spare that had waited
    ],
)
def test_what_a_spare_did_before_it_was_wanted_is_no_time_of_the_start(wanted_ns, own, spared):
    times = iter([900, 1000, 1000])
    startup = StartupClock.of_process(wanted_ns, 110, 130, 200, lambda: next(times)).startup()
    own = {phase: ns + (10 if phase == "process" and wanted_ns == 100 else 0) for phase, ns in own.items()}
    assert {phase: startup.phases_ns.get(phase, 0) for phase in own} == own
    assert startup.spared_ns == spared
    assert (startup.unaccounted_ns, startup.total_ns) == (0, 1000 - wanted_ns)
    assert startup.phases_ns["sockets"] == 1000 - max(wanted_ns, 200)


def test_the_sentence_says_the_sum_the_longest_phases_and_the_speed_of_each_tier():
    startup = Startup(
        begin_ns=0, end_ns=4_005_000_000,
        phases_ns={"process": 5_000_000, "imports": 3_000_000_000, "read_disk": 1_000_000_000},
        read_bytes={"disk": 100 << 20}, spared_ns={"imports": 500_000_000},
    )  # fmt: skip
    assert startup.sentence() == (
        "start-up: 4.00 s (imports 3.00 s, read disk 1.00 s, all else 0.01 s); 100 MiB of weights from the disk at "
        "100 MiB/s; a spare process spared 0.50 s"
    )
    assert startup.bytes_per_second("page_cache") is None


def test_a_run_of_another_version_tells_no_starts():
    one = StartupClock().startup()
    assert startups_of({"startups": [msgspec.to_builtins(one)]}) == [one]
    for other in (None, [], [{"begin_ns": 1}], "soon"):
        assert startups_of({"startups": other}) == []
