"""The life of core processes as the front leads it: silence, hangs, noise, spares, deaths and ends. No torch here."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.app import build_app
from sojourn.engine.server.core import core_process, sockets_folder, spare
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.core.heartbeat import PROFILING_SECONDS, TICK_SECONDS, Heartbeat
from sojourn.engine.server.core.sequence import CoreLost, oldest_wait_seconds
from sojourn.engine.server.core.sockets_folder import LOCK, SocketsFolder
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.metrics.compute.cost_model import ModelShape
from tests.engine.harness import stream_of, submit
from tests.engine.server.core import fake_core

ROOT = Path(__file__).parents[4]
SILENCE, HUNG = 0.5, 1.25  # seconds, below the bounds of the settings so that tests are short


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """The name of a socket has at most 107 characters, and pytest's folders have long names."""
    with tempfile.TemporaryDirectory(prefix="core-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def fake(monkeypatch, short_folder):
    """Cores are fake ones, and their sockets lie in a folder of the test."""
    monkeypatch.setattr(core_process, "MODULE", fake_core.__name__)
    monkeypatch.setattr(spare, "DELAY_SECONDS", 0)
    monkeypatch.setattr("tempfile.tempdir", str(short_folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@contextlib.asynccontextmanager
async def core_that(behaviour: str, monkeypatch, **settings) -> AsyncIterator[CoreClient]:
    monkeypatch.setenv("FAKE_CORE", behaviour)
    config = EngineConfig(model="tiny-model", spare_core=settings.pop("spare_core", False))
    config = config.model_copy(update={"core_silence_seconds": SILENCE, "core_hung_seconds": HUNG} | settings)
    one = spare.Spare()
    core = CoreClient(config, NoTelemetry(config), one)
    await core.start()
    try:
        yield core
    finally:
        await core.stop()
        await one.stop()
        assert not living_cores(), "no process is left"


def living_cores() -> list[int]:
    children = psutil.Process().children()
    return [child.pid for child in children if child.is_running() and child.name().startswith("sojourn-")]


async def until(condition: Callable[[], bool]) -> float:
    """Seconds that it took."""
    begin = time.monotonic()
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - begin


def sample(core: CoreClient, name: str) -> float:
    page = core._telemetry.scrape().decode()
    line = next(line for line in page.splitlines() if line.startswith(name))
    return float(line.rsplit(" ", 1)[1])


def test_a_core_that_falls_silent_is_told_killed_and_replaced_and_its_streams_end(monkeypatch):
    async def check() -> None:
        async with core_that("silent", monkeypatch) as core:
            await until(lambda: core.state == "ready")
            first, stream = core.pid(), stream_of(submit("a", [1]))
            core.submit(stream)
            await until(lambda: core.state == "hung")
            assert "no sign of life" in core.failure and "killed and replaced" in core.failure
            assert sample(core, 'sojourn_telemetry_core_hangs_total{model_name="tiny-model",outcome="noticed"}') == 1
            assert sample(core, "sojourn_telemetry_core_silence_seconds") >= SILENCE
            waited = oldest_wait_seconds(core.streams.values())
            assert SILENCE / 4 < waited < oldest_wait_seconds(core.streams.values()), "it ages while the core hangs"
            assert await until(stream.done.is_set) < HUNG
            assert oldest_wait_seconds(core.streams.values()) == 0
            with pytest.raises(CoreLost):
                stream.take()
            await until(lambda: core.state == "ready")
            assert core.pid() != first and core.failure is None
            assert sample(core, 'sojourn_telemetry_core_hangs_total{model_name="tiny-model",outcome="killed"}') == 1
            assert sample(core, "sojourn_telemetry_core_restarts_total") == 1

    asyncio.run(check())


def test_a_core_that_stands_still_for_a_while_goes_on(monkeypatch):
    async def check() -> None:
        async with core_that("beats", monkeypatch, core_hung_seconds=60) as core:
            await until(lambda: core.state == "ready")
            first = core.pid()
            os.kill(first, signal.SIGSTOP)
            await until(lambda: core.state == "hung")
            os.kill(first, signal.SIGCONT)
            await until(lambda: core.state == "ready")
            assert core.pid() == first and core.failure is None

    asyncio.run(check())


def test_noise_on_the_sockets_is_dropped_and_counted_on_both_sides(monkeypatch):
    async def check() -> None:
        async with core_that("garbage", monkeypatch) as core:
            await until(lambda: core.state == "ready")
            first, stream = core.pid(), stream_of(submit("a", [1]))
            for raw in fake_core.NOISE:
                core._send(raw)
            core.submit(stream)
            await until(lambda: len(stream.token_ns) > 3)
            name = 'sojourn_telemetry_unreadable_messages_total{model_name="tiny-model",receiver="%s"}'
            await until(lambda: sample(core, name % "core") == len(fake_core.NOISE))
            assert sample(core, name % "front") >= len(fake_core.NOISE)
            assert core.pid() == first and core.state == "ready"

    asyncio.run(check())


def test_a_spare_replaces_a_killed_core_and_is_replaced_itself(monkeypatch):
    async def check() -> None:
        async with core_that("beats", monkeypatch, spare_core=True) as core:
            await until(lambda: core.state == "ready")
            await until(lambda: len(living_cores()) == 2)
            first = core.pid()
            (waiting,) = set(living_cores()) - {first}
            os.kill(first, signal.SIGKILL)
            await until(lambda: core.pid() == waiting and core.state == "ready")
            await until(lambda: len(living_cores()) == 2)
            (dead,) = set(living_cores()) - {waiting}
            os.kill(dead, signal.SIGKILL)  # a spare that is dead is not taken
            await until(lambda: dead not in living_cores())
            os.kill(waiting, signal.SIGKILL)
            await until(lambda: core.pid() not in (waiting, dead) and core.state == "ready")

    asyncio.run(check())


def test_no_spare_is_started_beside_a_core_that_loads_and_none_without_the_setting(monkeypatch):
    async def check() -> None:
        for behaviour, spare_core in (("loads", True), ("beats", False)):
            async with core_that(behaviour, monkeypatch, spare_core=spare_core) as core:
                await until(lambda: len(living_cores()) == 1)
                await asyncio.sleep(0.3)
                assert len(living_cores()) == 1
                begin = time.monotonic()
                await core.stop()
                assert time.monotonic() - begin < 1, "a core that loads is not asked, but killed"

    asyncio.run(check())


@pytest.mark.parametrize("limit", [1, 2])
def test_a_core_that_dies_again_and_again_is_given_up(monkeypatch, limit):
    async def check() -> None:
        async with core_that("dies", monkeypatch, max_core_deaths=limit) as core:
            await until(lambda: core.state == "failed")
            assert f"died {limit} times within 60 s" in core.failure
            assert sample(core, "sojourn_telemetry_core_restarts_total") == limit - 1

    asyncio.run(check())


def test_a_model_that_is_refused_is_not_tried_again(monkeypatch):
    async def check() -> None:
        async with core_that("damaged", monkeypatch) as core:
            await until(lambda: core.state == "failed")
            assert core.failure == "the model is damaged"

    asyncio.run(check())


@pytest.mark.parametrize("state", ["computes", "is stopped", "loads"])
def test_giving_up_ends_every_stream_at_once(monkeypatch, state):
    async def check() -> None:
        async with core_that("loads" if state == "loads" else "beats", monkeypatch) as core:
            await until(lambda: core.state == ("loading" if state == "loads" else "ready") and bool(living_cores()))
            stream = stream_of(submit("a", [1]))
            core.submit(stream)
            draining = asyncio.create_task(core.drain(60))
            if state == "is stopped":
                os.kill(core.pid(), signal.SIGSTOP)
            await asyncio.sleep(0.1)
            core.give_up()
            core.give_up()  # a third signal changes nothing
            assert stream.done.is_set()
            begin = time.monotonic()
            await draining
            await core.stop()
            assert time.monotonic() - begin < 1

    asyncio.run(check())


def test_a_core_that_dies_while_the_server_drains_is_told_to_telemetry(monkeypatch):
    async def check() -> None:
        async with core_that("beats", monkeypatch) as core:
            await until(lambda: core.state == "ready")
            stream, told = stream_of(submit("a", [1])), []
            core.submit(stream)
            monkeypatch.setattr(core._telemetry, "core_died", told.append)
            draining = asyncio.create_task(core.drain(60))
            await asyncio.sleep(0)
            os.kill(core.pid(), signal.SIGKILL)
            await draining
            assert told == [False], "and no other core is started"

    asyncio.run(check())


def test_the_watches_of_the_machine_end_before_the_server_does(monkeypatch):
    samples = []

    async def watch() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.5)  # longer than a core that loads takes to end
            samples.append("last")

    async def check() -> None:
        monkeypatch.setenv("FAKE_CORE", "loads")
        monkeypatch.setattr(NoTelemetry, "watches", lambda telemetry, core_pid: [watch()])
        app = build_app(EngineConfig(model="tiny-model", telemetry="off"))
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0)
        assert samples == ["last"]

    asyncio.run(check())


def test_a_stream_whose_end_never_comes_is_lost_after_a_while(monkeypatch):
    async def check() -> None:
        async with core_that("beats", monkeypatch) as core:
            await until(lambda: core.state == "ready")
            stream = stream_of(submit("a", [1]))
            core.submit(stream)
            core.lose([stream])
            assert stream.ended.reason == "lost" and not core.streams

    asyncio.run(check())


def heartbeat(**settings) -> Heartbeat:
    return Heartbeat(EngineConfig(model="tiny-model", **settings), fake_core.READY)


def let_pass(beats: Heartbeat, seconds: float, *, is_profiling: bool = False) -> None:
    for _ in range(round(seconds / TICK_SECONDS)):
        beats.let_pass(TICK_SECONDS, is_profiling=is_profiling)


def test_silence_counts_from_the_last_message_up_to_the_bounds_of_the_settings():
    beats = heartbeat(core_silence_seconds=5, core_hung_seconds=10)
    let_pass(beats, 5)
    assert not beats.is_silent  # at the bound
    let_pass(beats, 0.25)
    assert beats.is_silent and not beats.is_hung
    let_pass(beats, 4.75)
    assert not beats.is_hung
    let_pass(beats, 0.25)
    assert beats.is_hung
    beats.sign_of_life()
    assert not beats.is_silent and beats.silence_seconds == 0


def test_a_front_that_stood_still_itself_accuses_nobody():
    beats = heartbeat()
    beats.let_pass(3600, is_profiling=False)
    assert not beats.is_silent


def test_a_profile_burst_may_hold_the_loop_up():
    beats = heartbeat(core_hung_seconds=6)
    let_pass(beats, PROFILING_SECONDS, is_profiling=True)
    assert not beats.is_silent
    assert beats.hung_after_seconds > PROFILING_SECONDS, "a call whose client left waits as long for its record"
    beats.let_pass(0, is_profiling=False)
    assert beats.is_hung


def test_the_longest_step_of_a_large_model_is_no_hang():
    shape = ModelShape(32_000, 4096, 2 * 10**9, 5 * 10**9, 16_384, ((None, 32),), 1, 1)
    large = msgspec.structs.replace(fake_core.READY, threads=2, max_model_len=4096, shape=shape)
    beats = Heartbeat(EngineConfig(model="tiny-model", max_num_batched_tokens=512), large)
    assert 300 < beats.longest_step_seconds < 900  # 7 TFLOP at 20 GFLOP/s
    assert Heartbeat(EngineConfig(model="tiny-model"), fake_core.READY).longest_step_seconds < 0.1


def test_folders_of_dead_fronts_are_removed_and_no_others(short_folder):
    living = SocketsFolder()
    dead, unlocked, strangers = (short_folder / f"sojourn-{name}" for name in ("7-dead", "8-new", "9-link"))
    for folder in (dead, unlocked):
        (folder / "generation").mkdir(parents=True)
    (dead / LOCK).touch()
    strangers.symlink_to(living.path)
    other = SocketsFolder()
    assert not dead.exists() and unlocked.exists() and strangers.exists() and living.path.exists()
    assert {path.stat().st_mode & 0o777 for path in (living.path, living.new_generation())} == {0o700}
    living.remove()
    other.remove()
    assert not living.path.exists()
    sockets_folder.remove_abandoned_folders()
    assert unlocked.exists()


def test_a_spare_and_a_core_die_with_their_front(tmp_path):
    script = """if True:
        import asyncio, sys
        from sojourn.engine.server.core import core_process
        core_process.MODULE = "tests.engine.server.core.fake_core"
        async def main():
            for _ in range(2):
                print((await core_process.CoreProcess.start()).pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())"""
    front = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    cores = [psutil.Process(int(front.stdout.readline())) for _ in range(2)]
    deadline = time.monotonic() + 10
    while any(core.name() != "sojourn-spare" for core in cores):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cores[0].suspend()  # also one that stands still
    front.kill()
    front.wait()
    deadline = time.monotonic() + 1
    while any(core.is_running() and core.status() != psutil.STATUS_ZOMBIE for core in cores):
        assert time.monotonic() < deadline
        time.sleep(0.02)
