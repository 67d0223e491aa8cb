"""The steps of a recorded run as a device estimate: what its machine takes for any plan of that model."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from sojourn.interop.probe.shape import shape_of
from sojourn.metrics.compute.cost_model import ModelShape, shape_from
from sojourn.metrics.compute.model_catalog import config_of, find_model, known_name, title_of
from sojourn.metrics.compute.model_families import completed_text
from sojourn.metrics.compute.number_formats import kv_format, weight_format
from sojourn.metrics.compute.rank_shape import rank_shape
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section, server_hardware
from sojourn.metrics.run.server_alone import requests_of
from sojourn.replay.device.catalogue import device_recorded_as
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError
from sojourn.replay.known_sizes import known_sizes
from sojourn.replay.settings import overlaps, recorded_config
from sojourn.replay.step_fit import StepTimes
from sojourn.replay.steps_table import FEWEST_STEPS, step_columns, under_load

RECORDED = "recorded"
SAME = 0.02  # of two numbers of weights: biases and norms are counted in one of them
# The median and the p90 of the sizes of normal errors, and half of what holds 80 %, as multiples of their mean size.
OF_MEAN = {"median": 0.845, "p90": 2.06, "80%": 1.61}


class RecordedSteps:
    """A `DeviceEstimate` of one run. What stalled its machine now and then is spread over all steps. Sizes that neither
    the run nor other runs of its model had go on by the last slope; a replay says how much of its time is such a
    guess."""

    host_ns = 0.0

    def __init__(
        self, name: str, times: StepTimes, kv_tokens: int, deployment: Deployment, *, with_host: bool = False
    ) -> None:  # fmt: skip
        """`with_host`: the times are of whole turns, the host's part included; else a replay has that part itself."""
        self.deployment, self.kv_tokens, self.times = deployment, kv_tokens, times
        self.composition: Composition = SERVING[deployment.backend].composition
        self.provenance = f"steps of {name}"
        self.error: KnownError | None = None
        if np.isfinite(times.error):
            self.error = error_of_mean(f"sizes of steps left out of the fit of {name}", times.error)
        self._device_ratio, host_ratio = times.plan_ratios
        self._host = (host_ratio * sum(times.host)).tolist() if with_host else None

    def device_ns(self, step: DeviceStep) -> float:
        tokens, chunks = step.tokens, len(step.chunks)
        sequences = step.decodes + chunks
        device_ns = self._device_ratio * self.times.device_ns(
            tokens, step.decodes, step.decode_pairs, chunks, step.chunk_pairs, sequences
        )
        if self._host is None:
            return device_ns
        fixed, of_sequence, of_prompt, of_token = self._host
        return device_ns + fixed + of_sequence * sequences + of_prompt * chunks + of_token * tokens


def error_of_mean(cell: str, mean: float) -> KnownError:
    """Of errors by the normal distribution whose size is `mean` on average."""
    return KnownError(
        cell=cell, measurements=0, median=OF_MEAN["median"] * mean, p90=OF_MEAN["p90"] * mean, bias=0.0,
        low=1 - min(OF_MEAN["80%"] * mean, 0.9), high=1 + OF_MEAN["80%"] * mean,
    )  # fmt: skip


def recorded_steps(
    run: RunDirectory, deployment: Deployment | None = None, *, with_host: bool = False
) -> RecordedSteps:  # fmt: skip
    """Those under load, as those of `deployment`, by default of the run's own. Raises ReplayError where there are too
    few, or where the run does not say its settings and its pool."""
    meta = run.meta()
    config = recorded_config(meta)
    steps = under_load(run.table("steps"), requests_of(run, meta))
    if len(steps) < FEWEST_STEPS:
        raise ReplayError(
            f"{run.name} has {len(steps)} step records; the time of a step is learnt from at least {FEWEST_STEPS}"
        )
    overlap = overlaps(config, meta)
    columns = step_columns(steps, overlap=overlap)
    known = known_sizes(meta, steps, columns)
    times = StepTimes(columns, None if known is None else known.steps)
    assert config.num_kv_blocks is not None, "the size of the pool is known"
    return RecordedSteps(
        run.name, times, config.num_kv_blocks * config.block_size, deployment or recorded_deployment(meta),
        with_host=with_host and not overlap,
    )  # fmt: skip


def recorded_deployment(meta: Mapping[str, Any]) -> Deployment:
    """As far as run.json says: the device is "recorded" where no entry of the catalogue has its name."""
    settings = engine_settings(dict(meta))
    gpus = server_hardware(meta).get("gpus") or []
    first = gpus[0] if gpus else None
    name = str(first.get("name", "") if isinstance(first, dict) else first or "")
    on_cpu = section(meta, "core").get("device") == "cpu"
    backend = section(meta, "probe").get("engine")
    return Deployment(
        model=str(settings.get("model") or RECORDED),
        device=(None if on_cpu else device_recorded_as(name)) or RECORDED,
        backend=backend if backend in ("vllm", "sglang", "trtllm") else "sojourn",
        tensor_parallel=int(settings.get("tensor_parallel") or 1),
        weight_format=_format(settings.get("weights") or section(meta, "core").get("dtype")),
        kv_format=_kv_format(settings.get("kv_cache_dtype"), section(meta, "core").get("dtype")),
    )


def of_model(run: RunDirectory, asked: Deployment) -> Deployment:
    """The run's own deployment, for a model that is asked for. Raises ReplayError where its steps say nothing of it."""
    meta = run.meta()
    recorded = recorded_deployment(meta)
    if asked.tensor_parallel != recorded.tensor_parallel:
        raise ReplayError(
            f"{run.name} was recorded with a tensor parallel degree of {recorded.tensor_parallel}, and its steps say "
            f"nothing of {asked.tensor_parallel}; give --tp {recorded.tensor_parallel}"
        )
    if asked.model != RECORDED and (why := _difference(meta, asked)):
        raise ReplayError(
            f"{run.name} is of another model than {title_of(asked.model)} ({why}), so its steps say nothing of this "
            "one's"
        )
    return msgspec.structs.replace(recorded, model=asked.model, device=RECORDED)


def _difference(meta: Mapping[str, Any], asked: Deployment) -> str:
    """In what a recorded model is another one, by all sizes that the run knows; "" where in nothing."""
    shape, sizes = shape_from(meta), find_model(asked.model)
    if shape is None:
        its, own = known_name(str(recorded_deployment(meta).model)), known_name(title_of(asked.model))
        return f"its model is {its}" if its and own and its != own else ""
    # Our server counts a rank's share, but of the vocabulary; the probe the whole model, by the sizes in its config.
    ranks = [rank_shape(sizes, tensor_parallel=degree) for degree in dict.fromkeys((1, asked.tensor_parallel))]
    counted = [msgspec.structs.replace(each, vocab_size=sizes.vocab_size) for each in ranks]
    if section(meta, "probe") and (simple := shape_of(completed_text(config_of(asked.model)))) is not None:
        counted.append(simple)
    found = [_differences(shape, each) for each in counted]
    return min(found, key=len)[0] if all(found) else ""


def _differences(own: ModelShape, other: ModelShape) -> list[str]:
    exact = {
        "layers": (own.num_layers, other.num_layers), "width": (own.hidden_size, other.hidden_size),
        "vocabulary": (own.vocab_size, other.vocab_size),
        "layers with experts": tuple(each.experts.num_layers if each.experts else 0 for each in (own, other)),
        "experts for each one that is chosen": (_per_chosen(own), _per_chosen(other)),
    }  # fmt: skip
    close = {
        "operations of heads for a pair": (own.pair_flops, other.pair_flops),
        "weights of heads of queries, keys and values": (own.attention_parameters, other.attention_parameters),
        "weights of feed-forward parts": (own.mlp_parameters, other.mlp_parameters),
    }  # fmt: skip
    found = [f"{name}: {one:g}, not {two:g}" for name, (one, two) in exact.items() if one != two]
    return found + [
        f"{name}: {one:,}, not {two:,}" for name, (one, two) in close.items() if abs(one - two) > SAME * two
    ]


def _per_chosen(shape: ModelShape) -> float:
    """The same of a rank that holds some of the experts."""
    return 0.0 if shape.experts is None else shape.experts.num_experts / shape.experts.num_chosen


def _kv_format(said: Any, dtype: Any) -> str:
    """That of the activations where none is said. Tables of kernels know one format of 16 bits."""
    try:
        found = kv_format(str(dtype if said in (None, "", "auto") else said))
    except InputError:
        return "bf16"
    return "bf16" if found.bits == 16 else found.name


def _format(said: Any) -> str:
    try:
        return weight_format(str(said)).name
    except InputError:
        return "bf16"
