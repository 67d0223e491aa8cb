"""What watches the machine goes on when one look at it fails, and looks once more at the end."""

import asyncio
import errno
import os
from random import Random

import psutil

from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import Observed
from sojourn.engine.server.telemetry import full as telemetry
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.random_records import random_step


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
    samples, take_sample = [], telemetry.SystemSampler.sample

    def sample(sampler, core_pid):
        samples.append(take_sample(sampler, core_pid))
        return samples[-1]

    monkeypatch.setattr(telemetry.SystemSampler, "sample", sample)
    monkeypatch.setattr(telemetry, "SAMPLE_SECONDS", 60)
    observer = telemetry.Telemetry(EngineConfig(model="tiny-model", run_dir=tmp_path / "run"))

    async def watch(fewest_seconds: float, until: int) -> None:
        monkeypatch.setattr(telemetry, "FEWEST_SAMPLE_SECONDS", fewest_seconds)
        sampling = asyncio.create_task(observer.sample_system(os.getpid))
        while len(samples) < until:
            await asyncio.sleep(0.01)
        sampling.cancel()
        await asyncio.wait([sampling])

    asyncio.run(watch(60, until=1))  # a last sample would be too short for a share of CPU time
    assert len(samples) == 1
    asyncio.run(watch(0, until=2))
    observer.close()
    assert RunDirectory(tmp_path / "run").table("system").ns.tolist() == [each.ns for each in samples]
    assert len(samples) == 3


def test_steps_that_cannot_be_worked_out_stop_neither_a_restart_nor_the_end(tmp_path, caplog, capsys):
    observer = telemetry.Telemetry(EngineConfig(model="tiny-model", run_dir=tmp_path / "run"))
    for last_call in (lambda: observer.core_died(True), observer.close):
        caplog.clear()
        observer.observed(Observed(random_step(Random(1)), []))  # no core was ever ready: no model gives it a cost
        last_call()
        assert "steps could not be worked out" in caplog.text
    assert b"sojourn_telemetry_core_restarts_total{" in observer.scrape()
    assert "0 requests are recorded" in capsys.readouterr().out, "the run was finished"
