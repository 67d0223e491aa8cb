"""Texts of our own making, with the names, units and blanks that the writers use."""

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from sojourn.interop.sources.nvml import Nvml
from sojourn.interop.sources.sensor_names import NAMES, WRITTEN, reasons_of
from sojourn.interop.sources.sensors import SensorLines, moment_of, read_sensors
from tests.interop.sources.stub_nvml import StubNvml

PAGE = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 1395
DCGM_FI_DEV_SM_CLOCK{gpu="1",UUID="GPU-2",device="nvidia1",Hostname="a"} 345
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 97
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 0.69
DCGM_FI_PROF_DRAM_ACTIVE{gpu="0",UUID="GPU-1",device="nvidia0",GPU_I_PROFILE="1g.5gb",GPU_I_ID="13",Hostname="a"} 0.5
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 4845
DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 4
DCGM_FI_DEV_MEMORY_TEMP{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 9223372036854775794
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 140737488355328
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{gpu="0",UUID="GPU-1",device="nvidia0",Hostname="a"} 12
"""
DMON = """#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk  pviol  tviol  rxpci  txpci
#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %    MHz    MHz      %   bool   MB/s   MB/s
 20260101   10:00:00      0    300     70      -     95     40   1593   1005     80      0    100      7
 20260101   10:00:00      1     60     30      -      0      0   1593    210      0      0      0      0
#Date       Time        gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk  pviol  tviol  rxpci  txpci
#YYYYMMDD   HH:MM:SS    Idx      W      C      C      %      %    MHz    MHz      %   bool   MB/s   MB/s
 20260101   10:00:01      0    301     71      -     96     41   1593   1005     80      0    100      7
"""
CSV = """timestamp, index, utilization.gpu [%], memory.used [MiB], power.draw [W], power.limit [W], temperature.gpu, \
clocks.sm [MHz], clocks_event_reasons.active
2026/01/01 10:00:00.500, 0, 97 %, 4845 MiB, 299.50 W, 300.00 W, 61, 1005 MHz, 0x0000000000000004
2026/01/01 10:00:01.500, 0, 3 %, 4845 MiB, [N/A], 300.00 W, 60, 210 MHz, 0x0000000000000001
"""


def test_page_of_dcgm_is_read_in_our_units_and_blanks_are_no_readings():
    found = read_sensors(PAGE, ns=7)
    assert found.kind == "DCGM page" and found.devices == ["GPU 0 of a", "GPU 1 of a", "GPU 0 instance 13 of a"]
    assert found.values("sm_clock") == [1395e6, 345e6] and found.values("gpu_utilisation") == [0.97]
    assert found.values("memory_bandwidth", "GPU 0 of a") == [0.69] and found.values("memory_used") == [4845 * 2**20]
    assert reasons_of(found.values("throttle")[0]) == ["sw_power_cap"]
    assert not found.values("memory_temperature") and not found.values("power")
    assert found.unread == ["DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL: its unit is not known here"]
    row = {"ns": 7, "device": "GPU 0 of a", "name": "sm_clock", "value": 1395e6}
    assert found.rows()[0] == row and {each["ns"] for each in found.rows()} == {7}


def test_dmon_is_read_behind_each_of_its_headers():
    found = read_sensors("noise\n" + DMON)
    assert found.values("power", "GPU 0") == [300, 301] and found.values("sm_clock", "GPU 1") == [210e6]
    assert found.values("power_violation", "GPU 0") == [0.8, 0.8] and found.values("pcie_rx")[0] == 100e6
    assert not found.values("memory_temperature")
    moments = sorted({each.ns for each in found.readings})
    assert moments[1] - moments[0] == 1_000_000_000


@pytest.mark.parametrize("nounits", [False, True])
def test_csv_is_read_with_units_in_its_cells_and_without(nounits):
    text = CSV
    if nounits:
        head, *rows = CSV.splitlines()
        text = "\n".join([head, *(row.replace(" %", "").replace(" MiB", "").replace(" W", "").replace(" MHz", "")
                                  for row in rows)])  # fmt: skip
    found = read_sensors(text)
    assert found.values("gpu_utilisation") == [0.97, 0.03] and found.values("power") == [299.5]
    assert found.values("power_limit") == [300, 300] and found.values("sm_clock") == [1005e6, 210e6]
    assert [reasons_of(bits) for bits in found.values("throttle")] == [["sw_power_cap"], []] and not found.unread


def test_reasons_in_columns_of_their_own_are_the_same_bits():
    text = "index, power.draw [W], clocks_throttle_reasons.hw_slowdown, clocks_throttle_reasons.sw_thermal_slowdown\n"
    found = read_sensors(text + "1, 70.00 W, Not Active, Active\n")
    assert [reasons_of(bits) for bits in found.values("throttle", "GPU 1")] == [["sw_thermal"]]
    assert read_sensors(text + "1, 70.00 W, [N/A], [N/A]\n").values("throttle") == []


def test_a_unit_that_is_not_known_is_refused_by_name():
    found = read_sensors("index, power.draw [hp], temperature.gpu\n0, 0.4 hp, 61\n")
    assert not found.values("power") and found.values("temperature") == [61]
    assert found.unread == ["power.draw: its unit hp is not one of W"]
    assert {unit for unit, _ in WRITTEN.values()} <= {each.unit for each in NAMES.values()}


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "vllm:num_requests_running 3\n", "# gpu is a word\n"])
def test_other_texts_are_nobodys_sensors(text):
    assert read_sensors(text) is None


def test_nvml_reads_all_devices_what_works_inside_them_and_each_error_once():
    stub = StubNvml(
        {"power": 250_000, "clock": 1005, "clock_limit": 1980, "gpu": 50, "memory": 10, "generation": 4, "lanes": 16,
         "gpm": {2: 31.0, 10: 80.0, 21: 1024.0}},
        {"clock": 210},
    )  # fmt: skip
    nvml = Nvml(stub)
    stub.events.append((1, 79))
    found, later = nvml.read(ns=1), nvml.read(ns=2)
    assert found.devices == ["GPU 0", "GPU 1"] and found.values("power") == [250.0]
    assert found.values("sm_clock") == [1005e6, 210e6] and found.values("memory_copy") == [0.1]
    assert found.values("sm_activity") == [0.31] and found.values("memory_bandwidth") == [0.8]
    assert found.values("pcie_rx") == [2**30] and found.values("pcie_lanes") == [16]
    assert found.values("xid", "GPU 1") == [0, 79] and later.values("xid") == [0, 0]
    assert "power of GPU 1: the device does not answer" in found.unread


# Columns of drivers from 450 to 580, with each of `-s pucvmet`, `-o D`, `-o T` and GPM.
SHAPES = {
    "old": ("# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk\n"
            "# Idx     W     C     C     %     %     %     %   MHz   MHz\n"
            "    0   200    60     -    90    40     0     0  7000  1350\n", False),
    "with date and time": ("#Date       Time        gpu   pwr gtemp mtemp    sm   mem  mclk  pclk   fb\n"
                           "#YYYYMMDD   HH:MM:SS    Idx     W     C     C     %     %   MHz   MHz   MB\n"
                           " 20260101   10:00:00      0   200    60     -    90    40  7000  1350  100\n",
                           True),
    "with time alone": ("#Time        gpu    pwr     sm   pclk\n#HH:MM:SS    Idx      W      %    MHz\n"
                        " 10:00:00      0    200     90   1350\n", False),
    "new": ("# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec    jpg    ofa   mclk   pclk     fb   bar1   ccpm\n"
            "# Idx      W      C      C      %      %      %      %      %      %    MHz    MHz     MB     MB     MB\n"
            "    0    200     60      -     90     40      0      0      0      0   7000   1350    100      2      0\n",
            False),
    "all": ("# gpu    pwr     sm   pclk  pviol  tviol  rxpci  txpci  sbecc  dbecc    pci  smutil   dram  pcirx\n"
            "# Idx      W      %    MHz      %   bool   MB/s   MB/s   errs   errs   errs   GPM:%  GPM:% GPM:MiB/s\n"
            "    0    200     90   1350     12      1    300      4      0      2      0      31     80       5\n",
            False),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_dmon_of_any_driver_is_read_by_the_names_of_its_columns(name):
    text, has_moments = SHAPES[name]
    found = read_sensors(text)
    assert found.values("power") == [200] and found.values("sm_clock") == [1350e6]
    assert found.values("gpu_utilisation") == [0.9] and found.has_moments == has_moments and not found.unread
    if name == "all":
        assert found.values("thermal_violation") == [1] and found.values("power_violation") == [0.12]
        assert found.values("sm_activity") == [0.31] and found.values("ecc_uncorrected") == [2]


@pytest.mark.parametrize(("zone", "hours"), [(UTC, 10), (timezone(timedelta(hours=2)), 8), (ZoneInfo("Asia/Tokyo"), 1)])
def test_local_times_are_of_the_stated_zone_however_they_are_written(zone, hours):
    expected = (datetime(2026, 1, 1, hours, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    for text in ("20260101 10:00:00", "2026/01/01 10:00:00", "2026/01/01 10:00:00.000", "Jan 01 10:00:00 2026"):
        assert moment_of(text, zone) == expected * 1000
    assert moment_of("10:00:00", zone) is None


def test_lines_that_come_one_by_one_are_read_by_the_header_before_them():
    lines, whole = DMON.splitlines(), read_sensors(DMON)
    for size in (1, 2, 3, len(lines)):
        follower = SensorLines()
        parts = [follower.read(lines[place : place + size]) for place in range(0, len(lines), size)]
        assert [each for part in parts for each in part.readings] == whole.readings, size


def test_rows_that_name_no_device_are_said_to_be_taken_for_one():
    head, rows = "utilization.gpu [%], power.draw [W]\n", "50 %, 70 W\n90 %, 71 W\n"
    assert any("add index" in each for each in read_sensors(head + rows).unread)
    assert not read_sensors(f"index, {head}" + "0, 50 %, 70 W\n1, 90 %, 71 W\n").unread
