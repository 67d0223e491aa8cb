"""Each kind of source, sampled beside a run: scripted pages, a scripted driver, a scripted program, and real files."""

import os
import time
from collections import namedtuple
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from sojourn.commands.summary import diagnose_run
from sojourn.interop.sources.nvml import Nvml
from sojourn.live.sensors import feed as feeds
from sojourn.live.sensors import source
from sojourn.live.sensors.feed import SensorFeed, running, writing_into
from sojourn.live.watch.recorder import Recorders
from sojourn.live.watch.watcher import Watcher
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory
from tests.interop.sources.stub_nvml import StubNvml
from tests.metrics.live_pages import pages, serving, working

PAGE = b"""# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-a",Hostname="n"} 1005
DCGM_FI_DEV_SM_CLOCK{gpu="1",UUID="GPU-b",Hostname="n"} 345
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",Hostname="n"} 0.31
"""
HEAD = "#Date       Time        gpu    pwr     sm   pclk\n#YYYYMMDD   HH:MM:SS    Idx      W      %    MHz\n"
SMI = """#!/bin/sh
case "$*" in
  *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
  *gpm-metrics*) echo 'Invalid combination of input arguments.'; exit 1 ;;
  *"dmon -s vt"*) printf '# gpu pviol tviol rxpci txpci\\n# Idx %% bool MB/s MB/s\\n 0 0 1 300 4\\n' ;;
  *) printf 'index, utilization.gpu [%%], clocks.sm [MHz], clocks_throttle_reasons.active\\n'
     printf '0, 97 %%, 1005 MHz, 0x0000000000000040\\n' ;;
esac
case "$*" in *"-l 1"*|*"-d 1"*) sleep 30 & trap 'kill $!' TERM; wait ;; esac
"""


def sampled(sources, path=None, until=lambda feed: feed.table(0, 2**62).ns.nunique() > 1, **asked):
    """What a feed has once something is there: by its own interval, so that no time is asserted."""
    feed = SensorFeed(sources, interval_s=0.05, **asked)
    feed.keep_s = 60.0
    with running(feed), writing_into(path, feed if path is not None else None):
        for _ in range(400):
            if until(feed):
                break
            time.sleep(0.05)
        return feed.table(0, 2**62), feed


def means(rows):
    return {
        f"{device} {name}": value for (device, name), value in rows.groupby(["device", "name"]).value.mean().items()
    }


def test_page_of_an_exporter_is_read_beside_the_run_and_written_into_it(tmp_path):
    run = RunDirectory(tmp_path)
    began_ns = time.monotonic_ns()
    with serving(lambda path: (200, PAGE) if path == "/metrics" else (404, b"")) as url:
        rows, feed = sampled([f"{url}/metrics"], tmp_path)
        named, _ = sampled([f"{url}#1"])
    assert means(rows) == {"GPU 0 of n sm_clock": 1005e6, "GPU 0 of n sm_activity": 0.31, "GPU 1 of n sm_clock": 345e6}
    assert set(named.device) == {"GPU 1 of n"} and feed.are_all and not feed.problems
    written = run.table("sensors")
    assert set(written.name) == {"sm_clock", "sm_activity"} and written.ns.between(began_ns, time.monotonic_ns()).all()


@pytest.mark.parametrize(("visible", "devices", "are_all"), [
    ("1", {"GPU 1 of n"}, False), ("0,1", {"GPU 0 of n", "GPU 1 of n"}, False),
    ("GPU-b", {"GPU 0 of n", "GPU 1 of n"}, True), ("", {"GPU 0 of n", "GPU 1 of n"}, True),
])  # fmt: skip
def test_devices_that_the_server_may_use_are_taken_from_its_environment(visible, devices, are_all):
    with serving(lambda path: (200, PAGE)) as url:
        feed = SensorFeed([url], interval_s=0.05)
        feed.narrow(visible)
        feed.keep_s = 60.0
        with running(feed):
            for _ in range(400):
                if len(rows := feed.table(0, 2**62)):
                    break
                time.sleep(0.05)
    assert set(rows.device) == devices and feed.are_all == are_all


def test_exporter_gets_no_key_of_the_server(monkeypatch):
    monkeypatch.setenv("SOJOURN_API_KEY", "secret")
    asked = []
    monkeypatch.setattr(source, "fetch", lambda url, timeout_s, **other: asked.append(other) or (200, PAGE))
    source.open_source(source.asked("127.0.0.1:9400"))
    assert asked == [{"has_key": False}]


def test_exporter_that_goes_away_is_a_problem_and_no_end():
    answers = [(200, PAGE), (200, PAGE)]
    with serving(lambda path: answers.pop() if answers else (503, b"")) as url:
        _, feed = sampled([url], until=lambda feed: any("503" in each for each in feed.problems))
    assert feed.problems == [f"{url}/metrics answers HTTP 503"] and len(feed.table(0, 2**62))


@pytest.mark.parametrize("zone", ["UTC", "+05:30", "Asia/Tokyo"])
def test_file_of_dmon_is_followed_and_its_times_are_of_the_stated_zone(tmp_path, zone):
    file = tmp_path / "dmon.txt"
    file.write_text(HEAD)
    wanted = source.asked(f"{file}@{zone}")
    local = (datetime.now(UTC) + timedelta(seconds=2)).astimezone(wanted.zone)
    old = local - timedelta(hours=1)
    lines = [f" {each:%Y%m%d}   {each:%H:%M:%S}      0    {power}     97   1005\n"
             for each, power in ((old, 100), (local, 300))]  # fmt: skip
    feed = SensorFeed([f"{file}@{zone}"], interval_s=0.05)
    feed.keep_s, began_ns = 60.0, time.monotonic_ns()
    with running(feed):
        for part in (lines[0], lines[1][:20], lines[1][20:]):
            with file.open("a") as opened:
                opened.write(part)
            time.sleep(0.15)
        for _ in range(400):
            if len(rows := feed.table(0, 2**62)):
                break
            time.sleep(0.05)
    assert means(rows) == {"GPU 0 power": 300, "GPU 0 gpu_utilisation": 0.97, "GPU 0 sm_clock": 1005e6}
    assert abs(rows.ns.iloc[0] - began_ns) < 60e9  # on the run's clock, whatever the zone


def test_driver_shows_all_devices_and_what_works_inside_them(monkeypatch):
    stub = StubNvml({"gpu": 97, "memory": 40, "reasons": 0x40, "gpm": {2: 31.0}}, {"gpu": 0, "memory": 0})
    monkeypatch.setattr(source, "open_source", lambda wanted: source.NvmlSource(Nvml(stub)))
    monkeypatch.setattr(feeds, "open_source", source.open_source)
    rows, _ = sampled(["nvml"])
    found = means(rows)
    assert found["GPU 0 throttle"] == 0x40 and found["GPU 0 sm_activity"] == 0.31
    assert found["GPU 1 gpu_utilisation"] == 0


def test_nvidia_smi_is_asked_in_the_words_of_its_driver(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    wanted = {"throttle", "thermal_violation"}
    rows, feed = sampled(["nvidia-smi"], until=lambda feed: wanted <= set(feed.table(0, 2**62).name))
    assert means(rows)["GPU 0 throttle"] == 0x40 and means(rows)["GPU 0 thermal_violation"] == 1
    assert means(rows)["GPU 0 pcie_rx"] == 300e6 and not feed.problems


def test_host_shows_use_steal_and_clock():
    Times = namedtuple("Times", "user system idle steal")
    times = iter([Times(0.0, 0.0, 0.0, 0.0), Times(20.0, 10.0, 40.0, 30.0)])
    host = source.Host(cpu_times=lambda: next(times), cpu_freq=lambda: SimpleNamespace(current=1200.0, max=3800.0))
    found = {each.name: each.value for each in host.read().readings}
    assert found == pytest.approx({"cpu_busy": 0.3, "cpu_steal": 0.3, "cpu_clock": 1.2e9, "cpu_clock_limit": 3.8e9})


@pytest.mark.parametrize(("given", "content", "why"), [
    ("nowhere.txt", None, "no such file"), ("127.0.0.1:9", None, "no server answers"),
    ("file", "a,b\n1,2\n", "no line names columns"), ("file", HEAD, "name the zone"),
    ("file", "# gpu    sm\n# Idx     %\n    0    90\n", "no date and time"), ("file@Mars", HEAD, "no time zone"),
    ("nvml@UTC", None, "a zone is of the times in a file"), ("nvml#a", None, "numbers of devices"),
])  # fmt: skip
def test_a_source_that_cannot_be_read_is_refused_with_what_to_give_instead(given, content, why, tmp_path):
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=why):
        SensorFeed([given.replace("file", str(file))])


@pytest.mark.parametrize(("module", "why"), [(None, "nvidia-ml-py"), (StubNvml(has_driver=False), "no NVIDIA driver")])
def test_nvml_is_refused_without_its_module_or_a_driver(module, why):
    with pytest.raises(InputError, match=why):
        source._nvml(module)


def test_page_of_another_exporter_is_refused():
    with serving(lambda path: (200, b"up 1\n")) as url, pytest.raises(InputError, match="no family of a DCGM exporter"):
        SensorFeed([url])


@pytest.mark.parametrize("word", source.WORDS)
def test_sensors_of_this_machine_are_not_of_a_server_elsewhere(word):
    with pytest.raises(InputError, match="another one"):
        SensorFeed([word], ["http://192.0.2.7:8000"])
    assert feeds.is_here("127.0.0.1:8000") and feeds.is_here("localhost:8000")


def test_a_watch_records_sensors_beside_its_pages_and_diagnose_says_the_same(tmp_path):
    throttled = (
        PAGE
        + b'DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",Hostname="n"} 97\n'
        + (
            b'DCGM_FI_DEV_MAX_SM_CLOCK{gpu="0",UUID="GPU-a",Hostname="n"} 1980\n'
            b'DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="0",UUID="GPU-a",Hostname="n"} 64\n'
        )
    )
    recorders = Recorders(tmp_path, {}, "run")
    with serving(working()) as url, serving(pages(throttled)) as exporter:
        feed = SensorFeed([exporter], [url], interval_s=0.1)
        watcher = Watcher([url], {}, window_s=4.0, interval_s=0.2, record=recorders, sensors=feed).start()
        try:
            for _ in range(300):
                if any(
                    "held down" in each for server in watcher.watch(steady=False).servers for each in server.devices
                ):
                    break
                time.sleep(0.1)
            said = watcher.watch(steady=False).servers[0]
        finally:
            watcher.stop()
    (run,) = recorders.close()
    assert any("held down by heat (the hardware's limit)" in each for each in said.warnings), said.warnings
    assert set(run.table("sensors").device) == {"GPU 0 of n", "GPU 1 of n"}
    found = diagnose_run(run)
    assert found.state == said.state == "healthy"
    assert any("GPU 0 of n works 97%" in each.reason for each in found.checks)
    assert any("held down by heat" in each for each in found.devices) and any("held down" in w for w in found.warnings)
