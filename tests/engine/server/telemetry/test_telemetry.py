"""What watches the machine goes on when one look at it fails, and looks once more at the end."""

import asyncio
import errno
import os

import psutil

from engine.config import EngineConfig
from engine.server.telemetry import full as telemetry
from metrics.run.directory import RunDirectory


def test_a_sample_that_fails_is_told_and_the_next_ones_come(tmp_path, monkeypatch, caplog):
    memory, failures = psutil.virtual_memory, [OSError(errno.EMFILE, "Too many open files")]

    def scarce():
        if failures:
            raise failures.pop()
        return memory()

    told = telemetry.Telemetry(EngineConfig(model="tiny-model", run_dir=tmp_path / "run"))
    monkeypatch.setattr(psutil, "virtual_memory", scarce)
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 0.01)

    async def watch() -> None:
        sampling = asyncio.create_task(told.sample_system(os.getpid))
        while not RunDirectory(tmp_path / "run").sources("system") and not sampling.done():
            await asyncio.sleep(0.05)
        sampling.cancel()

    asyncio.run(asyncio.wait_for(watch(), 20))
    told.close()
    assert not failures and "Too many open files" in caplog.text
    assert len(RunDirectory(tmp_path / "run").table("system")) >= 1


def test_the_time_since_the_last_sample_is_sampled_at_the_end(tmp_path, monkeypatch):
    told = telemetry.Telemetry(EngineConfig(model="tiny-model", run_dir=tmp_path / "run"))
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 60)

    async def watch(seconds: float) -> None:
        sampling = asyncio.create_task(told.sample_system(os.getpid))
        await asyncio.sleep(seconds)
        sampling.cancel()
        await asyncio.wait([sampling])

    asyncio.run(watch(0.1))  # too short for a share of its CPU time
    asyncio.run(watch(0.6))
    told.close()
    gaps = RunDirectory(tmp_path / "run").table("system").ns.diff()
    assert len(gaps) == 3 and gaps.iloc[-1] >= telemetry.FEWEST_SAMPLE_SECONDS * 1e9
