"""The machine's sensors: a scripted NVIDIA driver, and energy counters of a kernel in a folder."""

import os
import time
from collections import namedtuple
from types import SimpleNamespace

import pytest

from sojourn.metrics.machine.process_use import process_use
from sojourn.metrics.machine.sampler import THROTTLE_REASONS, CpuEnergy, GpuSensors, SystemSampler, throttle_reasons
from sojourn.metrics.records import SystemRecord

S = 1_000_000_000
Times = namedtuple("Times", ["user", "idle", "steal", "guest"])  # as psutil gives them, but fewer


class DriverError(Exception):
    """As the driver's module raises them."""


class Driver:
    """A driver with two devices that answers as nvidia-ml-py does; `broken` names the calls that have no sensor."""

    NVMLError = DriverError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, *broken: str):
        self.broken = set(broken)
        self.opened = None

    def __getattribute__(self, name: str):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):

            def refuse(*_):
                raise DriverError("Not Supported")

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        """The library was found."""

    def nvmlDeviceGetHandleByIndex(self, index):
        if index > 1:
            raise DriverError("Invalid Argument")
        self.opened = index
        return f"device {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.opened = uuid
        return "device by name"

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(total=150_000_000_000, free=50_000_000_000, used=100_000_000_000)

    def nvmlDeviceGetPowerUsage(self, device):
        return 612_345  # milliwatts

    def nvmlDeviceGetClockInfo(self, device, kind):
        return {1: 1755, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, device, sensor):
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, device):
        return 0x4 | 0x20


ALL = {
    "gpu_utilisation_percent": 87.0, "gpu_memory_used_bytes": 100_000_000_000, "gpu_power_watts": 612.345,
    "gpu_sm_clock_mhz": 1755.0, "gpu_memory_clock_mhz": 3201.0, "gpu_temperature_celsius": 61.0,
    "gpu_throttle_reasons": ["sw_power_cap", "sw_thermal"],
}  # fmt: skip


def test_every_sensor_of_the_driver_is_read_in_the_units_of_the_record():
    assert GpuSensors(Driver(), {}).read() == ALL
    assert set(ALL) <= {field for field in SystemRecord.__struct_fields__}


@pytest.mark.parametrize(("call", "lost"), [
    ("nvmlDeviceGetUtilizationRates", "gpu_utilisation_percent"), ("nvmlDeviceGetPowerUsage", "gpu_power_watts"),
    ("nvmlDeviceGetCurrentClocksEventReasons", "gpu_throttle_reasons"),
])  # fmt: skip
def test_a_missing_sensor_hides_no_other(call, lost):
    assert GpuSensors(Driver(call), {}).read() == {name: value for name, value in ALL.items() if name != lost}


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_without_a_device_there_is_nothing_to_read(broken):
    assert GpuSensors(Driver(broken), {}).read() == {}


@pytest.mark.parametrize(("visible", "opened"), [(None, 0), ("1", 1), ("1,0", 1), ("GPU-8f2a", "GPU-8f2a")])
def test_the_device_is_the_first_that_cuda_sees(visible, opened):
    driver = Driver()
    GpuSensors(driver, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert driver.opened == opened


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_device_that_is_hidden_from_cuda_is_not_read(visible):
    """Whoever hides all of them computes on the CPU: what a GPU draws meanwhile is not his."""
    assert GpuSensors(Driver(), {"CUDA_VISIBLE_DEVICES": visible}).read() == {}


def test_reasons_are_named_as_nvml_names_them():
    import pynvml

    named = {
        bit: name for bit, name in THROTTLE_REASONS.items()
    }  # fmt: skip
    constants = [value for name, value in vars(pynvml).items()
                 if name.startswith("nvmlClocksEventReason") and not name.endswith(("All", "None"))]  # fmt: skip
    assert set(named) == set(constants)
    assert throttle_reasons(0) == []
    assert throttle_reasons(0x1 | 0x8) == ["gpu_idle", "hw_slowdown"]
    assert throttle_reasons(0x4 | 0x8000) == ["sw_power_cap", "bits_0x8000"]


def counters(folder, **microjoules):
    for name, value in microjoules.items():
        zone = folder / name.replace("_", ":")
        zone.mkdir(exist_ok=True)
        (zone / "energy_uj").write_text(f"{value}\n")
        (zone / "max_energy_range_uj").write_text("1000000\n")
    return folder


def test_power_of_the_packages_is_what_their_counters_gain(tmp_path):
    names = ("intel-rapl_0", "intel-rapl_1", "intel-rapl_0_0")  # the last is a part of the first
    energy = CpuEnergy(counters(tmp_path, **dict.fromkeys(names, 100_000)))
    assert energy.watts(0) is None  # nothing to compare with
    counters(tmp_path, **dict(zip(names, (600_000, 350_000, 300_000), strict=True)))
    assert energy.watts(S // 2) == pytest.approx((0.5 + 0.25) / 0.5)
    counters(tmp_path, **{names[0]: 100_000})  # it wrapped at one joule
    assert energy.watts(S) == pytest.approx(0.5 / 0.5)


def test_without_readable_counters_there_is_no_power(tmp_path):
    energy = CpuEnergy(tmp_path)
    assert energy.watts(0) is None and energy.watts(S) is None


def test_a_sample_knows_both_processes_and_their_ends(tmp_path):
    sampler = SystemSampler(os.getpid(), nvml=Driver(), powercap=tmp_path)
    record = sampler.sample(os.getpid())
    # The core counts the processes beside it, which are ranks: here those that other tests have started.
    assert 0 < record.front_cpu_seconds <= record.core_cpu_seconds + 0.5
    assert record.core_rss_bytes >= 0.8 * record.front_rss_bytes
    assert record.gpu_power_watts == 612.345 and record.cpu_power_watts is None
    gone = sampler.sample(None)
    assert gone.core_cpu_seconds is gone.core_rss_bytes is gone.core_cpu_percent is None


def test_a_machine_without_a_driver_has_none_of_its_sensors(tmp_path):
    record = SystemSampler(os.getpid(), nvml=None, powercap=tmp_path).sample(None)
    assert {getattr(record, name) for name in ALL} == {None}


def steal_of(tmp_path, *readings) -> list[float | None]:
    """What a sampler tells that is made at the first reading, and samples at each later one."""
    read = iter(readings)
    sampler = SystemSampler(os.getpid(), nvml=None, powercap=tmp_path, cpu_times=lambda: next(read))
    return [sampler.sample(None).host_steal_percent for _ in readings[1:]]


def test_steal_is_the_share_of_all_cores_since_the_sample_before(tmp_path):
    readings = Times(9, 9, 9, 9), Times(9.5, 10.0, 9.5, 9.5), Times(9.5, 12.0, 9.5, 9.5), Times(9.5, 12.0, 10.0, 9.5)
    assert steal_of(tmp_path, *readings) == [25.0, 0.0, 100.0]  # a guest's time is the user's, too


def test_steal_is_not_told_before_the_ticks_move_nor_where_nobody_counts_it(tmp_path):
    assert steal_of(tmp_path, Times(9, 9, 9, 9), Times(9, 9, 9, 9), Times(9, 10, 9, 9)) == [None, 0.0]
    uncounted = namedtuple("Times", ["user", "idle"])
    assert steal_of(tmp_path, uncounted(1, 1), uncounted(2, 2)) == [None]


def test_a_counter_that_goes_back_takes_nothing_from_the_others(tmp_path):
    assert steal_of(tmp_path, Times(5, 5, 5, 5), Times(6, 4.5, 6, 5)) == [50.0]


def fake_proc(folder, pid: int, threads: dict[int, tuple[int, int]], pressure_us: int | None = None):
    """/proc of a machine with one process: thread → nanoseconds on a core and in the run queue."""
    for thread, (cpu_ns, queued_ns) in threads.items():
        (folder / str(pid) / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
        (folder / str(pid) / "task" / str(thread) / "schedstat").write_text(f"{cpu_ns} {queued_ns} 12\n")
    status = "Name:\tsojourn\nvoluntary_ctxt_switches:\t70\nnonvoluntary_ctxt_switches:\t9\n"
    (folder / str(pid) / "status").write_text(status)
    if pressure_us is not None:
        (folder / "pressure").mkdir(exist_ok=True)
        (folder / "pressure" / "cpu").write_text(f"some avg10=1.00 total={pressure_us}\nfull total=0\n")
    return folder


def test_time_in_the_run_queue_is_that_of_all_threads_and_apart_that_of_the_loop(tmp_path):
    pid = os.getpid()
    proc = fake_proc(tmp_path, pid, {pid: (5 * S, 2 * S), pid + 1: (S, 3 * S)}, 1_000_000)
    clock = iter([0, 2 * S])
    sampler = SystemSampler(pid, nvml=None, clock_ns=lambda: next(clock), proc=proc)
    fake_proc(tmp_path, pid, {}, 1_500_000)
    sample = sampler.sample(None)
    assert (sample.front_loop_cpu_ns, sample.front_loop_queued_ns, sample.front_queued_ns) == (5 * S, 2 * S, 5 * S)
    assert sample.front_involuntary_switches == 9 and sample.core_queued_ns is None
    assert sample.cpu_pressure_percent == pytest.approx(25.0)


def test_a_kernel_that_counts_no_waiting_leaves_it_open(tmp_path):
    sample = SystemSampler(os.getpid(), nvml=None, proc=tmp_path).sample(None)
    assert sample.front_queued_ns is None and sample.cpu_pressure_percent is None
    assert sample.front_cpu_seconds > 0


def test_this_kernel_counts_a_thread_that_works():
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("this kernel has no schedstat")
    before = after = process_use(os.getpid())
    deadline = time.monotonic() + 5
    while after.main.cpu_ns == before.main.cpu_ns and time.monotonic() < deadline:  # the kernel counts at its ticks
        sum(range(200_000))
        after = process_use(os.getpid())
    assert after.main.cpu_ns > before.main.cpu_ns and after.queued_ns >= before.queued_ns


def test_time_of_the_ranks_that_the_core_started_is_the_core_s(tmp_path):
    core, rank = os.getpid(), os.getppid()
    proc = fake_proc(tmp_path, core, {core: (5 * S, 2 * S)})
    alone = SystemSampler(core, nvml=None, proc=proc).sample(core)
    fake_proc(tmp_path, rank, {rank: (S, 3 * S)})
    (proc / str(core) / "task" / str(core) / "children").write_text(f"{rank} ")
    both = SystemSampler(core, nvml=None, proc=proc).sample(core)
    assert (alone.core_queued_ns, both.core_queued_ns) == (2 * S, 5 * S)
    assert both.core_loop_queued_ns == 2 * S
    assert both.core_rss_bytes > alone.core_rss_bytes
