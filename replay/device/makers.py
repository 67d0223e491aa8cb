"""The estimate of a deployment, by its maker, with what is known of that maker's error."""

from collections.abc import Mapping

from sojourn.replay.device.catalogue import Device, device_named
from sojourn.replay.device.estimate import Deployment, DeviceEstimate
from sojourn.replay.device.known_errors import Maker, known_error
from sojourn.replay.device.measured_kernels import measured_kernels
from sojourn.replay.device.roofline import Roofline


def estimate_of(
    deployment: Deployment, maker: Maker = "kernels", devices: Mapping[str, Device] | None = None
) -> DeviceEstimate:
    """`devices`: those of the user's file. Raises InputError for an unknown device, PackageMissing, OutsideTables."""
    device_named(deployment.device, devices)
    error = known_error(deployment, maker)
    return measured_kernels(deployment, error) if maker == "kernels" else Roofline(deployment, devices, error)
