"""One source of sensors: a DCGM exporter, NVML, nvidia-smi, a file that it writes, or the host's CPU.

A source is written as SOURCE, SOURCE@ZONE for the local times in a file, and SOURCE#0,1 for some of its devices.
"""

import re
from collections.abc import Callable
from datetime import UTC, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urldefrag
from zoneinfo import ZoneInfo

import psutil

from sojourn.interop.sources.nvml import Nvml
from sojourn.interop.sources.sensor_names import CPU, MHZ
from sojourn.interop.sources.sensors import Reading, SensorLines, Sensors, read_sensors
from sojourn.live.sensors.nvidia_smi import NvidiaSmi
from sojourn.live.watch.fetch import base_of, fetch, is_address
from sojourn.metrics.errors import InputError, ServerError
from sojourn.metrics.machine.host import busy_percent, steal_percent
from sojourn.metrics.machine.sampler import pynvml

NVML, NVIDIA_SMI, HOST = "nvml", "nvidia-smi", "host"
WORDS = (NVML, NVIDIA_SMI, HOST)  # sources of this machine
TIMEOUT_S = 5.0
OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)")
UNKNOWN = (
    "--sensors {0}: there is no such file, and it is no address; give the URL of a DCGM exporter, nvml, nvidia-smi, a "
    "file of `nvidia-smi dmon -o DT`, or host"
)
NO_MODULE = "--sensors nvml needs the Python package nvidia-ml-py; pip install nvidia-ml-py, or give nvidia-smi"
NO_DRIVER = "--sensors nvml: no NVIDIA driver answers here ({}); give the URL of the server's DCGM exporter"
NO_FAMILY = "--sensors {}: no family of a DCGM exporter is on its page; its address is most often HOST:9400"
NO_COLUMNS = "--sensors {}: no line names columns of nvidia-smi; give the file of `nvidia-smi dmon -o DT`"
NO_TIMES = "--sensors {}: its rows have no date and time; write it with `nvidia-smi dmon -o DT`, or add timestamp"
NO_ZONE = (
    "--sensors {0}: nvidia-smi writes local times without a zone; name the zone: {0}@UTC, {0}@Europe/Berlin or "
    "{0}@+02:00"
)


class Source(Protocol):
    """What a feed asks once per second, in a thread of its own."""

    def read(self) -> Sensors:
        """What is new; readings without a moment are of now. Raises ServerError where nothing answers."""

    def close(self) -> None: ...


class Asked(NamedTuple):
    """A source as it is written."""

    text: str
    name: str
    zone: tzinfo | None
    devices: frozenset[str]  # "0", "1"; all where it is empty

    def wants(self, device: str) -> bool:
        return not self.devices or device == CPU or device.removeprefix("GPU ").partition(" ")[0] in self.devices


def asked(text: str) -> Asked:
    """Raises InputError for a zone or a device that is none."""
    name, devices = urldefrag(text) if not Path(text).is_file() else (text, "")
    numbers = [each.strip() for each in devices.split(",") if each.strip()]
    if devices and not all(each.isdigit() for each in numbers):
        raise InputError(f"--sensors {text}: behind # stand numbers of devices, such as #0,1")
    zone = None
    if "@" in name and not Path(name).is_file():
        name, _, written = name.rpartition("@")
        zone = _zone(text, written)
    return Asked(text, name, zone, frozenset(numbers))


def open_source(wanted: Asked) -> Source:
    """Raises InputError, with what to give instead, where there is no such source here."""
    if wanted.zone is not None and not Path(wanted.name).is_file():
        raise InputError(f"--sensors {wanted.text}: a zone is of the times in a file, and {wanted.name} is none")
    if wanted.name == NVML:
        return _nvml()
    if wanted.name == NVIDIA_SMI:
        return NvidiaSmi()
    if wanted.name == HOST:
        return Host()
    if Path(wanted.name).is_file():
        return SensorFile(Path(wanted.name), wanted.zone)
    if is_address(wanted.name):
        return Exporter(wanted.name)
    raise InputError(UNKNOWN.format(wanted.name))


def _zone(text: str, written: str) -> tzinfo:
    if (found := OFFSET.fullmatch(written)) is not None:
        minutes = 60 * int(found[2]) + int(found[3])
        return timezone(timedelta(minutes=minutes if found[1] == "+" else -minutes))
    try:
        return ZoneInfo(written)
    except (KeyError, ValueError, OSError):
        raise InputError(f"--sensors {text}: {written!r} is no time zone; give UTC, Europe/Berlin or +02:00") from None


def _nvml(module: Any = pynvml) -> "Source":
    if module is None:
        raise InputError(NO_MODULE)
    try:
        return NvmlSource(Nvml(module))
    except module.NVMLError as error:
        raise InputError(NO_DRIVER.format(error)) from None


class NvmlSource:
    def __init__(self, nvml: Nvml):
        self._nvml = nvml

    def read(self) -> Sensors:
        return self._nvml.read()

    def close(self) -> None:
        pass


class Exporter:
    """The page of a DCGM exporter. It renews its values every 30 s unless it was started with a shorter interval."""

    def __init__(self, url: str):
        self._url = f"{base_of(url)}/metrics"
        try:
            self.read()
        except ServerError as error:
            raise InputError(f"--sensors {url}: {error}") from None

    def read(self) -> Sensors:
        status, body = fetch(self._url, TIMEOUT_S, has_key=False)
        if status != 200:
            raise ServerError(f"{self._url} answers HTTP {status}")
        found = read_sensors(body.decode("utf-8", "replace"))
        if found is None:
            raise InputError(NO_FAMILY.format(self._url.removesuffix("/metrics")))
        return found

    def close(self) -> None:
        pass


class SensorFile:
    """A file that nvidia-smi writes, followed from its beginning: what is of the time of a run, its moments say."""

    def __init__(self, path: Path, zone: tzinfo | None):
        self._path, self._offset = path, 0
        self._lines = SensorLines(zone or UTC)
        self._first: Sensors | None = self._read()
        if not self._lines.header:
            raise InputError(NO_COLUMNS.format(path))
        if self._first.readings and not self._first.has_moments:
            raise InputError(NO_TIMES.format(path))
        if zone is None:
            raise InputError(NO_ZONE.format(path))

    def read(self) -> Sensors:
        first, self._first = self._first, None
        return first if first is not None else self._read()

    def close(self) -> None:
        pass

    def _read(self) -> Sensors:
        """The rows behind those that were read, up to the last whole line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except OSError as error:
            raise ServerError(f"{self._path} cannot be read: {error.strerror}") from None
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return self._lines.read(whole.decode("utf-8", "replace").splitlines())


class Host:
    """Use, steal and clock of this machine's CPUs since the reading before."""

    def __init__(self, cpu_times: Callable[[], Any] = psutil.cpu_times, cpu_freq: Callable[[], Any] = psutil.cpu_freq):
        self._cpu_times, self._cpu_freq = cpu_times, cpu_freq
        self._last = cpu_times()

    def read(self) -> Sensors:
        before, self._last = self._last, self._cpu_times()
        shares = {"cpu_busy": busy_percent(before, self._last), "cpu_steal": steal_percent(before, self._last)}
        values = {name: percent / 100 for name, percent in shares.items() if percent is not None}
        clock = self._cpu_freq()
        if clock is not None:
            values |= {"cpu_clock": clock.current * MHZ} if clock.current else {}
            values |= {"cpu_clock_limit": clock.max * MHZ} if clock.max else {}  # a virtual machine may have none
        return Sensors("host", [Reading(None, CPU, name, value) for name, value in values.items()])

    def close(self) -> None:
        pass
