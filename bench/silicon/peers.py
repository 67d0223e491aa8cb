"""Beside the estimates: servcalc in an environment of its own, and the steps of LatencyPrism's public recording."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.silicon.figures import Errors, errors
from bench.silicon.rows import Measured
from bench.steps.public_steps import decodes
from sojourn.metrics.compute.model_catalog import published_models
from sojourn.replay.device.estimate import Deployment, DeviceStep
from sojourn.replay.device.makers import estimate_of

GPUS = {"h100_sxm": "H100 80GB", "h200_sxm": "H200", "b200_sxm": "B200"}
SCRIPT = """
import json, sys
from servcalc import Workload, estimate, profiles
for line in sys.stdin:
    asked = json.loads(line)
    try:
        profile = profiles.vllm(quant=asked["quant"])
        load = Workload(asked["prompt"], asked["output"], (asked["concurrency"],))
        point = estimate(asked["model"], asked["gpu"], workload=load, profile=profile).points[0]
        print(json.dumps(point.itl_ms.mid), flush=True)
    except Exception as error:
        print(json.dumps(str(error)), flush=True)
"""


class Peer(NamedTuple):
    """What a peer said of the measurements that it can say something of."""

    errors: Errors  # of TPOT
    places: set[int]  # of those measurements
    refused: int


def servcalc(rows: Sequence[Measured], python: Path) -> Peer:
    """One GPU only, in bf16 or fp8. `python`: an interpreter that has servcalc."""
    found, places, refused = [], set(), 0
    with tempfile.TemporaryDirectory() as folder:
        asked = []
        for row in rows:
            d = row.deployment
            if d.tensor_parallel != 1 or d.device not in GPUS or d.model not in published_models():
                continue
            path = Path(folder) / d.model / "config.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(published_models()[d.model]))
            quant = {"bf16": None, "fp8": "fp8"}.get(d.weight_format, d.weight_format)
            asked.append(
                (row, {"model": str(path.parent), "gpu": GPUS[d.device], "quant": quant, "prompt": row.prompt_tokens,
                       "output": row.output_tokens, "concurrency": row.concurrency})
            )  # fmt: skip
        done = subprocess.run(
            [str(python), "-c", SCRIPT], input="\n".join(json.dumps(each) for _, each in asked), capture_output=True,
            text=True, check=True,
        )  # fmt: skip
    for (row, _), line in zip(asked, done.stdout.splitlines(), strict=True):
        said = json.loads(line)
        if isinstance(said, str):
            refused += 1
        else:
            found.append(said / row.tpot_ms - 1)
            places.add(row.place)
    return Peer(errors(found), places, refused)


class Steps(NamedTuple):
    """Of one degree: errors of single decode steps, as they are and with one factor for all."""

    degree: int
    steps: int
    plain: Errors
    with_factor: Errors
    factor: float  # measured / estimated, at a batch of 32


def public_steps(folder: Path, degrees: Sequence[int] = (4, 8)) -> list[Steps]:
    """Decode steps of a 70B model on A100s under vLLM 0.10. How many devices it had is not stated."""
    measured, _ = decodes(folder)
    found = []
    for degree in degrees:
        estimate = estimate_of(Deployment(model="Llama-3.1-70B", device="a100_sxm", tensor_parallel=degree))
        said = np.array([
            estimate.device_ns(DeviceStep((), int(batch), int(context)))
            for batch, context in zip(measured.batch, measured.context, strict=True)
        ])  # fmt: skip
        ratio = said / measured.ns
        factor = float(1 / np.median(ratio[measured.batch == 32]))
        found.append(Steps(degree, len(ratio), errors(ratio - 1), errors(factor * ratio - 1), factor))
    return found
