"""Which sensors of power a machine may have, and the joules between two of its samples. It imports no pandas: the
server's front counts with it, and starts a third of a second sooner without pandas."""

from sojourn.metrics.records import SystemRecord

# Device → its column in the table `system`
SENSORS = {"gpu": "gpu_power_watts", "cpu": "cpu_power_watts"}
LONGEST_GAP_S = 5.0  # between two samples: the energy of a longer gap is unknown


def joules_between(earlier: SystemRecord, later: SystemRecord, device: str) -> float | None:
    """What a device of SENSORS drew between two samples; None without a sensor, or where they are too far apart."""
    first, second = getattr(earlier, SENSORS[device]), getattr(later, SENSORS[device])
    seconds = (later.ns - earlier.ns) / 1e9
    if first is None or second is None or not 0 <= seconds <= LONGEST_GAP_S:
        return None
    return (first + second) / 2 * seconds
