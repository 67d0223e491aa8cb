"""The estimate of a deployment, by its maker, with what is known of that maker's error."""

from collections.abc import Mapping

from sojourn.replay.device.catalogue import Device, device_named, replaced_figures
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, OutsideTables
from sojourn.replay.device.known_errors import Maker, known_error
from sojourn.replay.device.measured_kernels import measured_kernels
from sojourn.replay.device.roofline import Roofline


def estimate_of(
    deployment: Deployment, maker: Maker = "kernels", devices: Mapping[str, Device] | None = None
) -> DeviceEstimate:
    """`devices`: those of the user's file. Raises InputError for an unknown device, PackageMissing, OutsideTables."""
    device_named(deployment.device, devices)
    if maker == "kernels" and devices is not None and (given := replaced_figures(deployment.device, devices)):
        raise OutsideTables(
            f"kernels are measured on {deployment.device} as it is sold, and its file of devices gives another "
            f"{' and '.join(given)}"
        )
    error = known_error(deployment, maker)
    return measured_kernels(deployment, error) if maker == "kernels" else Roofline(deployment, devices, error)
