"""The estimate of a deployment: of a run's own steps, of measured kernels where they reach, else the roofline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sojourn.metrics.installed import PackageMissing
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.device.catalogue import Device
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, KnownError, OutsideTables
from sojourn.replay.device.known_errors import known_error
from sojourn.replay.device.makers import estimate_of
from sojourn.replay.sizing.recorded import recorded_server


class Made(NamedTuple):
    """An estimate, and what came with it."""

    estimate: DeviceEstimate
    settings: Mapping[str, Any]  # of EngineConfig, of a recorded server
    why_roofline: str  # why it is not of measured kernels; "" where that was not asked for
    corrected: KnownError | None = None  # its known error once a measured point corrects it


def estimate_for(deployment: Deployment, devices: Mapping[str, Device], maker: str = "auto") -> Made:
    """A device that is a folder is a recorded run. Raises OutsideTables, PackageMissing, InputError and ReplayError."""
    if deployment.device not in devices and (Path(deployment.device) / "run.json").is_file():
        return Made(*recorded_server(RunDirectory.open(Path(deployment.device)), deployment), "")
    errors = [known_error(deployment, each, is_corrected=True) for each in ("kernels", "roofline")]
    if maker == "roofline":
        return Made(estimate_of(deployment, "roofline", devices), {}, "", errors[1])
    try:
        return Made(estimate_of(deployment, "kernels", devices), {}, "", errors[0])
    except (PackageMissing, OutsideTables) as error:
        if maker == "kernels":
            raise
        return Made(estimate_of(deployment, "roofline", devices), {}, str(error), errors[1])
