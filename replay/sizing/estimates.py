"""The estimate of a deployment: of a run's own steps, of measured kernels where they reach, else the roofline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sojourn.metrics.installed import PackageMissing
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.device.catalogue import Device
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, OutsideTables
from sojourn.replay.device.makers import estimate_of
from sojourn.replay.sizing.recorded import recorded_server


class Made(NamedTuple):
    """An estimate, and what came with it."""

    estimate: DeviceEstimate
    settings: Mapping[str, Any]  # of EngineConfig, of a recorded server
    why_roofline: str  # why it is not of measured kernels; "" where that was not asked for


def estimate_for(deployment: Deployment, devices: Mapping[str, Device], maker: str = "auto") -> Made:
    """A device that is a folder is a recorded run. Raises OutsideTables, PackageMissing, InputError and ReplayError."""
    if deployment.device not in devices and (Path(deployment.device) / "run.json").is_file():
        return Made(*recorded_server(RunDirectory.open(Path(deployment.device)), deployment), "")
    if maker == "roofline":
        return Made(estimate_of(deployment, "roofline", devices), {}, "")
    try:
        return Made(estimate_of(deployment, "kernels", devices), {}, "")
    except (PackageMissing, OutsideTables) as error:
        if maker == "kernels":
            raise
        return Made(estimate_of(deployment, "roofline", devices), {}, str(error))
