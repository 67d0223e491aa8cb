"""What a deployment is good for: its memory, the largest load within the objectives, its walls, its price."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.engine.config import EngineConfig
from sojourn.metrics.compute.cost_model import ModelShape, StepWork
from sojourn.metrics.compute.memory_plan import GIB, MemoryPlan, memory_plan
from sojourn.metrics.compute.model_sizes import ModelSizes
from sojourn.metrics.compute.rank_shape import kv_bytes_per_token, rank_shape
from sojourn.metrics.errors import ReplayError
from sojourn.replay.device.catalogue import Device
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, DeviceStep, OutsideTables
from sojourn.replay.device.simulate import server_config
from sojourn.replay.sizing.corrected import CorrectedEstimate, Correction
from sojourn.replay.sizing.fleet import MOST_REPLICAS, Fleet, fleet_for
from sojourn.replay.sizing.limit import FEWEST_ANSWERS, Limit, Objectives, Server, Trial, largest_rate, largest_slots
from sojourn.replay.sizing.load import SizedLoad
from sojourn.replay.verdict.plan import usd_per_million_tokens
from sojourn.replay.verdict.walls import (
    MeanRequest,
    Wall,
    bandwidth_wall,
    binding,
    compute_wall,
    memory_wall,
    objective_wall,
)

COARSE = 0.1  # of a rate: the tolerance of searches for bounds
NEARER, ONE_POINT = "near this load", "one point, and give it with `sojourn size … --calibrate RUN`"
START = 0.8  # of what a full server gives
LONG_REQUEST, LARGE_BLOCK = 4096, 128  # tokens
SPREAD = 1.28  # standard deviations that nine of ten moments keep
OVER_LINK = 0.7  # of a link's rate that a transfer of keys and values gets; assumed


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is sized for."""

    objectives: Objectives
    share: float = 0.9  # of the requests that must keep them
    settings: Mapping[str, Any] = {}  # of EngineConfig, in place of those of the backend's defaults
    usd_per_hour: float | None = None  # of one device, in place of the catalogue's
    rate_rps: float | None = None  # that a fleet must serve
    has_split: bool = True
    has_bounds: bool = True


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Servers for prompts apart from servers for decodes, each of the deployment's size."""

    prefill_rps: float  # requests per second that one prefill server serves within its objective of TTFT
    decode_rps: float
    transfer_ms: float  # of the keys and values of a mean prompt over the node's link

    @property
    def decodes_per_prefill(self) -> float:
        """Decode servers for one prefill server."""
        return self.prefill_rps / self.decode_rps


class Sized(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment's answer. Bounds are those between which the known error of its estimate puts 80 % of cases."""

    deployment: Deployment
    plan: MemoryPlan | None
    kv_tokens: int  # that the simulation had
    most_sequences: int
    limit: Limit | None
    own: Trial | None  # at the load's own rate
    low: float | None  # of the largest rate, or of slots
    high: float | None
    walls: list[Wall]
    split: Split | None
    fleet: Fleet | None
    usd_per_hour: float | None  # of the replica
    price_source: str | None
    provenance: str
    error: Any  # a KnownError, or None
    correction: Correction | None
    doubts: list[str]
    refused: str = ""

    @property
    def best(self) -> Trial | None:
        return None if self.limit is None else self.limit.kept

    @property
    def binding(self) -> str | None:
        """The wall that is nearest: of the limit's rate, where an objective or a backlog ended the search first."""
        wall = binding(self.walls)
        return None if wall is None else wall.name

    @property
    def usd_per_million(self) -> float | None:
        """Output tokens that come within the objectives."""
        best = self.best
        if best is None or self.usd_per_hour is None:
            return None
        return usd_per_million_tokens(self.usd_per_hour, best.output_tokens_per_s * best.attainment)


def sized(
    sizes: ModelSizes, load: SizedLoad, device: Device | None, estimate: DeviceEstimate, question: Question,
    correction: Correction | None = None, why_roofline: str = "",
) -> Sized:  # fmt: skip
    """`why_roofline`: why the times are not of measured kernels. Raises OutsideTables and ReplayError."""
    deployment = estimate.deployment
    _refuse_longer(sizes, load)
    if correction is not None:
        estimate = CorrectedEstimate(estimate, correction, correction.error)
    config = server_config(estimate, **_settings(estimate, load, question))
    steps = _decodes_at_most(sizes, estimate, config, load, question)
    expected = None if steps is None else steps.concurrent
    server = Server(estimate, config, load, question.objectives, at_a_time=expected)
    limit = _limit(server, load, question, steps)
    low, high = _bounds(server, limit, question)
    own = None
    if load.slots is None and load.has_own_rate and not math.isnan(load.rate_rps):
        own = server.at_rate(load.rate_rps)
    plan = None if device is None else plan_of(sizes, device, estimate, config, load)
    price = question.usd_per_hour if question.usd_per_hour is not None else (device.usd_per_hour if device else None)
    return Sized(
        deployment=deployment,
        plan=plan,
        kv_tokens=estimate.kv_tokens,
        most_sequences=config.max_num_seqs,
        limit=limit,
        own=own,
        low=low,
        high=high,
        walls=_walls(sizes, device, estimate, config, load, limit, question),
        split=_split(sizes, device, estimate, config, load, question) if question.has_split else None,
        fleet=_fleet(estimate, config, load, limit, question),
        usd_per_hour=None if price is None else price * deployment.num_devices,
        price_source="given" if question.usd_per_hour is not None else (device.price_source if device else None),
        provenance=estimate.provenance,
        error=estimate.error,
        correction=correction,
        doubts=([f"peak rates, no kernels: {why_roofline}"] if why_roofline else [])
        + _outside(limit, low, high)
        + _doubts(estimate, limit, plan, sizes, is_corrected=correction is not None),
    )


def _outside(limit: Limit, low: float | None, high: float | None) -> list[str]:
    """A largest load that its own interval leaves out, since the times of this cell err to one side."""
    best = limit.kept
    value = None if best is None else best.rate_rps if best.slots is None else float(best.slots)
    if value is None or limit.missed is None or (low is None and high is None):
        return []
    most = math.inf if high is None and low is not None else high or 0.0
    if (low or 0.0) <= value <= most:
        return []
    short, end = ("short", most) if value > most else ("long", low or 0.0)
    return [
        f"the times of this cell are known to be too {short}, so that the largest load, {value:,.4g}, lies "
        f"outside of its 80% interval: plan with {end:,.4g}"
    ]


def _refuse_longer(sizes: ModelSizes, load: SizedLoad) -> None:
    """Raises ReplayError for a request beyond the model's context."""
    longest = int((load.prompt_tokens + load.output_tokens).max())
    if sizes.longest and longest > sizes.longest:
        raise ReplayError(
            f"{sizes.name} has a context of {sizes.longest:,} tokens, and a request of {load.name} has {longest:,}"
        )


def _settings(estimate: DeviceEstimate, load: SizedLoad, question: Question) -> dict[str, Any]:
    """Those of the question, and a pool of as many blocks as its tokens fill. Long requests have large blocks: as exact
    to a percent or two, and simulated several times as fast."""
    settings = dict(question.settings)
    if load.mean_prompt + load.mean_output >= LONG_REQUEST:
        settings.setdefault("block_size", LARGE_BLOCK)
    if "block_size" in settings:
        settings.setdefault("num_kv_blocks", max(1, estimate.kv_tokens // int(settings["block_size"])))
    return settings


def refused(deployment: Deployment, sentence: str) -> Sized:
    """The answer where there is no estimate."""
    return Sized(
        deployment=deployment, plan=None, kv_tokens=0, most_sequences=0, limit=None, own=None, low=None, high=None,
        walls=[], split=None, fleet=None, usd_per_hour=None, price_source=None, provenance="", error=None,
        correction=None, doubts=[], refused=sentence,
    )  # fmt: skip


def _fleet(
    estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad, limit: Limit, question: Question
) -> Fleet | None:  # fmt: skip
    if question.rate_rps is None or limit.kept is None or limit.kept.rate_rps is None:
        return None
    replicas = math.ceil(question.rate_rps / limit.kept.rate_rps)
    if replicas > MOST_REPLICAS:
        return Fleet(replicas=replicas, rate_rps=question.rate_rps, enough=None, too_few=None)
    objectives = [dict(each) for each in question.objectives]
    return fleet_for(load, question.rate_rps, limit.kept.rate_rps, estimate, config, objectives, question.share)


def plan_of(
    sizes: ModelSizes, device: Device, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad
) -> MemoryPlan:  # fmt: skip
    deployment, serving = estimate.deployment, SERVING[estimate.deployment.backend]
    budget = config.max_num_batched_tokens
    return memory_plan(
        sizes,
        device.memory_gib * GIB,
        weights=deployment.weight_format,
        kv=deployment.kv_format,
        tensor_parallel=deployment.tensor_parallel,
        expert_parallel=deployment.expert_parallel,
        utilisation=serving.memory_fraction,
        is_of_free=serving.fraction_is_of_free,
        batch_tokens=budget if isinstance(budget, int) else serving.step_tokens,
        most_sequences=config.max_num_seqs,
        length=load.mean_prompt + load.mean_output,
    )


def _limit(server: Server, load: SizedLoad, question: Question, steps: Wall | None) -> Limit:
    if load.slots is not None:
        return largest_slots(server, question.share, load.slots)
    start = server.full.served_rps if server.full.served_rps > 0 else load.rate_rps
    if steps is not None and steps.requests_per_s:
        start = min(start, steps.requests_per_s)
    return largest_rate(server, question.share, START * start)


def _bounds(server: Server, limit: Limit, question: Question) -> tuple[float | None, float | None]:
    """The largest rate, or slots, if every step takes as long as the bounds of the known error say. The high one is
    None where the load has too few requests to tell."""
    error, best = server.estimate.error, limit.kept
    if error is None or best is None or not question.has_bounds or limit.ends_early:
        return None, None
    found: list[float | None] = []
    for factor in (error.high, error.low):
        other = server.slower(factor)
        if best.slots is not None:
            slots = largest_slots(other, question.share, max(1, round(best.slots / factor)), COARSE).kept
            found.append(None if slots is None or slots.slots is None else float(slots.slots))
        else:
            bound = largest_rate(other, question.share, (best.rate_rps or 1.0) / factor, COARSE)
            found.append(None if bound.kept is None or bound.ends_early else bound.kept.rate_rps)
    return found[0], found[1]


class _EstimatedSteps:
    """The model of step times that the wall of an objective asks."""

    def __init__(self, estimate: DeviceEstimate, num_layers: int) -> None:
        self._estimate, self._layers = estimate, num_layers

    def predict_work(self, work: StepWork, *, eager: bool = True) -> float | None:
        decodes, tokens = int(work.decodes), int(work.tokens)
        past = int(work.decode_pairs) // self._layers
        chunks = ((tokens - decodes, 0),) if tokens > decodes else ()
        try:
            return self._estimate.device_ns(DeviceStep(chunks, decodes, past)) + self._estimate.host_ns
        except OutsideTables:
            return None


def _walls(
    sizes: ModelSizes, device: Device | None, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad,
    limit: Limit, question: Question,
) -> list[Wall]:  # fmt: skip
    best = limit.kept or (limit.trials[0] if limit.trials else None)
    if best is None:
        return []
    deployment = estimate.deployment
    shape: ModelShape = rank_shape(
        sizes, deployment.weight_format, deployment.kv_format, deployment.tensor_parallel, deployment.expert_parallel
    )
    mean = MeanRequest(
        prompt_tokens=load.mean_prompt, computed_tokens=load.mean_prompt * (1 - best.hit_rate),
        output_tokens=load.mean_output,
    )  # fmt: skip
    walls = [memory_wall(shape, mean, estimate.kv_tokens, best.mean_e2e_ms / 1e3)]
    if device is not None:
        walls += [
            compute_wall(shape, mean, device.flops_of(deployment.weight_format)),
            bandwidth_wall(shape, mean, best.in_flight, device.bandwidth_gbs * 1e9),
        ]
    bound = _decodes_at_most(sizes, estimate, config, load, question, best.hit_rate)
    return walls if bound is None else [*walls, bound]


def _decodes_at_most(
    sizes: ModelSizes, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad, question: Question,
    hit_rate: float = 0.0,
) -> Wall | None:  # fmt: skip
    """The wall of the objective of TPOT; None without one. A hit rate of 1 leaves the decodes alone."""
    tpot = min((each["tpot_ms"] for each in question.objectives if each.get("tpot_ms")), default=None)
    if tpot is None:
        return None
    mean = MeanRequest(
        prompt_tokens=load.mean_prompt, computed_tokens=load.mean_prompt * (1 - hit_rate),
        output_tokens=load.mean_output,
    )  # fmt: skip
    deployment = estimate.deployment
    shape = rank_shape(sizes, deployment.weight_format, deployment.kv_format, deployment.tensor_parallel)
    steps: Any = _EstimatedSteps(estimate, shape.num_layers)
    return objective_wall(shape, mean, steps, tpot, config.max_num_seqs)


def _split(
    sizes: ModelSizes, device: Device | None, estimate: DeviceEstimate, config: EngineConfig, load: SizedLoad,
    question: Question,
) -> Split | None:  # fmt: skip
    """None where one of the two keeps no objective, and for a load without a rate or without an objective of TPOT.

    Prompts are simulated, each with one token. Decodes alone run at the batch whose step takes as long as the objective
    allows, or that the pool holds, less the spread of a number that arrivals by chance give.
    """
    decodes = _decodes_at_most(sizes, estimate, config, load, question, hit_rate=1.0)
    if load.slots is not None or decodes is None or not decodes.requests_per_s or not decodes.concurrent:
        return None
    first = [{name: value for name, value in each.items() if name != "tpot_ms"} for each in question.objectives]
    try:
        prefill = Server(estimate, config, load.with_one_token(), first, at_a_time=1)
        one = largest_rate(prefill, question.share, prefill.full.served_rps, COARSE)
    except (OutsideTables, ReplayError):
        return None
    if one.kept is None or one.kept.rate_rps is None or one.ends_early:
        return None
    most = min(decodes.concurrent, estimate.kv_tokens / (load.mean_prompt + load.mean_output))
    batch = max(1.0, most - SPREAD * math.sqrt(most))
    rate = batch / decodes.concurrent * decodes.requests_per_s
    deployment = estimate.deployment
    kv = kv_bytes_per_token(sizes, deployment.kv_format, deployment.tensor_parallel)
    link = math.nan if device is None else device.link_gbs * 1e9 * OVER_LINK
    return Split(
        prefill_rps=one.kept.rate_rps, decode_rps=rate, transfer_ms=1e3 * kv * load.mean_prompt / link
    )  # fmt: skip


def _doubts(
    estimate: DeviceEstimate, limit: Limit, plan: MemoryPlan | None, sizes: ModelSizes, *, is_corrected: bool
) -> list[str]:  # fmt: skip
    doubts = []
    if is_corrected and estimate.error is None:
        doubts.append("the times are corrected by one measured point, and the known error is of uncorrected ones")
    elif estimate.error is None:
        doubts.append("no public measurement judges this cell, so the error of its times is not known")
    elif estimate.error.p90 > 0.4:
        doubts.append(
            f"times of {estimate.error.cell} were wrong by up to {estimate.error.p90:.0%} for nine of ten "
            f"measurements: measure {NEARER if is_corrected else ONE_POINT}"
        )
    if not is_corrected and estimate.error is not None and not estimate.error.has_degree:
        doubts.append(
            f"the known error is of {estimate.error.cell}; no measurement there is of "
            f"{estimate.deployment.tensor_parallel} × {estimate.deployment.device}"
        )
    if limit.ends_early:
        doubts.append(
            f"the load has too few requests to fill the server, {limit.trials[0].requests:,} after its start, so that "
            "the limit lies above; give a longer load, or lengths such as 1024/256"
        )
    elif limit.kept is None:
        doubts.append("no load that was tried keeps the objectives: the device is too slow for them, or too small")
    elif limit.kept.slots is None and limit.kept.answers_long < FEWEST_ANSWERS:
        doubts.append(
            f"{limit.kept.requests:,} requests came within {limit.kept.answers_long:.1f} answers' time, too soon for a "
            "steady state: the largest load is lower"
        )
    elif limit.missed is None:
        doubts.append("the largest load that was tried keeps the objectives, so the limit lies above it")
    if plan is not None and abs(plan.kv_tokens / max(1, estimate.kv_tokens) - 1) > 0.25:
        doubts.append(
            f"the memory plan has room for {plan.kv_tokens:,} tokens, the estimate that was simulated for "
            f"{estimate.kv_tokens:,}: servers count work space and windows differently"
        )
    if sizes.is_language_part:
        doubts.append("only the language part is counted; the weights for images or sound come on top")
    return doubts
