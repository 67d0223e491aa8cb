"""The split of prefill and decode servers, judged by the public measurements of such deployments."""

import re
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from bench.silicon.rows import FORMATS, MODELS
from sojourn.metrics.errors import SojournError
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, DeviceStep
from sojourn.replay.device.makers import estimate_of


class Judged(NamedTuple):
    """One measured deployment. Predicted over measured."""

    device: str
    backend: str
    tpot: float
    throughput: float


def judge() -> tuple[list[Judged], Counter]:
    """The rows that can be judged, and how many cannot, by why."""
    frame = pd.read_csv(Path(str(resources.files("aiconfigurator_core"))) / "systems" / "silicon_sample.csv")
    found, refused, known = [], Counter(), {}
    for row in frame[frame["mode"] == "disagg"].itertuples(index=False):
        if row.prefill_attention_dp_size > 1 or row.decode_attention_dp_size > 1:
            refused["attention is data parallel"] += 1
            continue
        if max(row.prefill_pp_size, row.decode_pp_size) > 1:
            refused["layers are divided into a pipeline"] += 1
            continue
        said = re.search(r"silicon_concurrency=(\d+)", row.silicon_data_source)
        if said is None:  # its batches are settings, not what ran
            refused["its concurrency is not said"] += 1
            continue
        if not (row.decode_num_workers > 0 and row.prefill_num_workers > 0 and row.decode_tp_size > 0):
            refused["its servers are not said"] += 1
            continue
        try:
            prefill = _estimate(row, "prefill", known)
            decode = _estimate(row, "decode", known)
            found.append(_judged(row, int(said[1]), prefill, decode))
        except SojournError:
            refused["outside of the tables"] += 1
    return found, refused


def _judged(row, concurrency: int, prefill: DeviceEstimate, decode: DeviceEstimate) -> Judged:
    isl, osl = int(row.isl), int(row.osl)
    batch = max(1, round(concurrency / row.decode_num_workers))
    step_ms = (decode.device_ns(DeviceStep((), batch, batch * (isl + osl // 2))) + decode.host_ns) / 1e6
    together = max(1, min(concurrency, SERVING[row.backend].step_tokens // isl))
    prompts = prefill.device_ns(DeviceStep(tuple([(isl, 0)] * together), 0, 0)) + prefill.host_ns
    prompt_ms = prompts / 1e6 / together
    measured_rps = 1e3 * concurrency / (row.silicon_ttft_ms + (osl - 1) * row.silicon_tpot_ms)
    decode_rps = 1e3 * batch / (step_ms * osl)
    rate = min(1e3 * row.prefill_num_workers / prompt_ms, decode_rps * row.decode_num_workers)
    return Judged(
        row.system, row.backend, step_ms / row.silicon_tpot_ms, rate / measured_rps
    )  # fmt: skip


def _estimate(row, part: str, known: dict) -> DeviceEstimate:
    tensor, expert = (int(getattr(row, f"{part}_{name}") or 1) for name in ("tp_size", "moe_ep_size"))
    weights = FORMATS.get(row.gemm_quant_mode, FORMATS.get(row.moe_quant_mode, "bf16"))
    deployment = Deployment(
        model=MODELS.get(row.model_path, row.model_path), device=row.system, backend=row.backend,
        tensor_parallel=tensor, expert_parallel=expert if expert <= tensor else 1, weight_format=weights,
    )  # fmt: skip
    if deployment not in known:
        try:
            known[deployment] = estimate_of(deployment, "kernels")
        except SojournError as error:
            known[deployment] = error
    if isinstance(known[deployment], SojournError):
        raise known[deployment]
    return known[deployment]


def summary(found: list[Judged]) -> dict[str, tuple[float, float, float]]:
    """Of TPOT and of throughput: median and p90 of the error, and the bias."""
    shown = {}
    for name in ("tpot", "throughput"):
        errors = np.array([getattr(each, name) for each in found]) - 1
        shown[name] = float(np.median(abs(errors))), float(np.quantile(abs(errors), 0.9)), float(errors.mean())
    return shown
