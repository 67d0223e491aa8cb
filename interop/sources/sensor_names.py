"""The sensors of a machine: each of our names once, with its unit, and what each writer calls it.

`gpu_utilisation` says that some kernel ran, not that the device was full: `sm_activity` says how much of it worked.
"""

from typing import NamedTuple

from sojourn.metrics.machine.sampler import THROTTLE_REASONS, throttle_reasons

CPU = "CPU"  # the device of the host's own sensors
SHARE, WATT, HERTZ, CELSIUS, BYTES, RATE = "share", "W", "Hz", "°C", "bytes", "bytes/s"
COUNT, BITS, NUMBER = "errors", "bits", "number"
MIB, KB, MHZ = 2.0**20, 1e3, 1e6


class Names(NamedTuple):
    """One sensor: its unit with us, and (name, unit) with each writer."""

    unit: str
    dcgm: tuple[tuple[str, float], ...] = ()  # family → factor: the exporter's page has no unit
    dmon: tuple[str, ...] = ()
    query: tuple[str, ...] = ()  # of --query-gpu


def _same(*names: str, factor: float = 1.0) -> tuple[tuple[str, float], ...]:
    return tuple((f"DCGM_FI_{name}", factor) for name in names)


NAMES: dict[str, Names] = {
    "gpu_utilisation": Names(SHARE, _same("DEV_GPU_UTIL", factor=0.01), ("sm",), ("utilization.gpu",)),
    "engine_activity": Names(SHARE, _same("PROF_GR_ENGINE_ACTIVE"), ("gract",)),
    "sm_activity": Names(SHARE, _same("PROF_SM_ACTIVE"), ("smutil",)),
    "sm_occupancy": Names(SHARE, _same("PROF_SM_OCCUPANCY"), ("smocc",)),
    "tensor_activity": Names(SHARE, _same("PROF_PIPE_TENSOR_ACTIVE"), ("mmaact",)),
    "memory_bandwidth": Names(SHARE, _same("PROF_DRAM_ACTIVE"), ("dram",)),
    "memory_copy": Names(SHARE, _same("DEV_MEM_COPY_UTIL", factor=0.01), ("mem",), ("utilization.memory",)),
    "sm_clock": Names(
        HERTZ, _same("DEV_SM_CLOCK", factor=MHZ), ("pclk",),
        ("clocks.sm", "clocks.current.sm", "clocks.gr", "clocks.current.graphics"),
    ),
    "sm_clock_limit": Names(
        HERTZ, _same("DEV_MAX_SM_CLOCK", factor=MHZ), (), ("clocks.max.sm", "clocks.max.gr", "clocks.max.graphics")
    ),
    "memory_clock": Names(
        HERTZ, _same("DEV_MEM_CLOCK", factor=MHZ), ("mclk",), ("clocks.mem", "clocks.current.memory")
    ),
    "power": Names(
        WATT, _same("DEV_POWER_USAGE", "DEV_POWER_USAGE_INSTANT"), ("pwr",),
        ("power.draw", "power.draw.average", "power.draw.instant"),
    ),
    "power_limit": Names(
        WATT, _same("DEV_ENFORCED_POWER_LIMIT", "DEV_POWER_MGMT_LIMIT"), (), ("enforced.power.limit", "power.limit")
    ),
    "power_limit_default": Names(WATT, _same("DEV_POWER_MGMT_LIMIT_DEF"), (), ("power.default_limit",)),
    "temperature": Names(CELSIUS, _same("DEV_GPU_TEMP"), ("gtemp",), ("temperature.gpu",)),
    "memory_temperature": Names(CELSIUS, _same("DEV_MEMORY_TEMP"), ("mtemp",), ("temperature.memory",)),
    "memory_used": Names(BYTES, _same("DEV_FB_USED", factor=MIB), ("fb",), ("memory.used",)),
    "memory_free": Names(BYTES, _same("DEV_FB_FREE", factor=MIB), (), ("memory.free",)),
    "memory_total": Names(BYTES, _same("DEV_FB_TOTAL", factor=MIB), (), ("memory.total",)),
    "pcie_rx": Names(RATE, _same("PROF_PCIE_RX_BYTES"), ("rxpci", "pcirx")),
    "pcie_tx": Names(RATE, _same("PROF_PCIE_TX_BYTES"), ("txpci", "pcitx")),
    "pcie_generation": Names(
        NUMBER, _same("DEV_PCIE_LINK_GEN"), (), ("pcie.link.gen.current", "pcie.link.gen.gpucurrent")
    ),
    "pcie_lanes": Names(NUMBER, _same("DEV_PCIE_LINK_WIDTH"), (), ("pcie.link.width.current",)),
    "nvlink_rx": Names(RATE, _same("PROF_NVLINK_RX_BYTES"), ("nvlrx",)),
    "nvlink_tx": Names(RATE, _same("PROF_NVLINK_TX_BYTES"), ("nvltx",)),
    "throttle": Names(
        BITS, _same("DEV_CLOCK_THROTTLE_REASONS", "DEV_CLOCKS_EVENT_REASONS"), (),
        ("clocks_throttle_reasons.active", "clocks_event_reasons.active"),
    ),
    "power_violation": Names(SHARE, (), ("pviol",)),
    "thermal_violation": Names(SHARE, (), ("tviol",)),
    "xid": Names(COUNT, _same("DEV_XID_ERRORS")),  # the number of the last error, 0 of none
    "ecc_corrected": Names(
        COUNT, _same("DEV_ECC_SBE_VOL_TOTAL"), ("sbecc",), ("ecc.errors.corrected.volatile.total",)
    ),
    "ecc_uncorrected": Names(
        COUNT, _same("DEV_ECC_DBE_VOL_TOTAL"), ("dbecc",), ("ecc.errors.uncorrected.volatile.total",)
    ),
    "pcie_replays": Names(COUNT, _same("DEV_PCIE_REPLAY_COUNTER"), ("pci",)),
    # Of the host, under the device CPU. The limit is that of the fastest core alone.
    "cpu_busy": Names(SHARE),
    "cpu_steal": Names(SHARE),
    "cpu_clock": Names(HERTZ),
    "cpu_clock_limit": Names(HERTZ),
}  # fmt: skip
# How a writer of text writes a unit: ours, and the factor. GPM columns of dmon have it behind a colon.
WRITTEN: dict[str, tuple[str, float]] = {
    "%": (SHARE, 0.01), "W": (WATT, 1.0), "mW": (WATT, 1e-3), "MHz": (HERTZ, MHZ), "C": (CELSIUS, 1.0),
    "MB": (BYTES, MIB), "MiB": (BYTES, MIB), "GiB": (BYTES, 2.0**30), "MB/s": (RATE, 1e6), "MiB/s": (RATE, MIB),
    "KB/s": (RATE, KB), "KiB/s": (RATE, 2.0**10), "errs": (COUNT, 1.0), "bool": (SHARE, 1.0),
}  # fmt: skip
UNWRITTEN = (CELSIUS, COUNT, BITS, NUMBER)  # nvidia-smi writes no unit behind these
REASONS = {name: bit for bit, name in THROTTLE_REASONS.items()} | {
    "applications_clocks_setting": 0x2, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80, "display_clock_setting": 0x100,
}  # fmt: skip


def reasons_of(bits: float) -> list[str]:
    """Why the clock is low, by name; the idle device's own reason is none."""
    return [name for name in throttle_reasons(int(bits)) if name != "gpu_idle"]
