"""What a fleet gives under each routing policy, and the processes that replay it."""

import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.metrics.interrupts import own_interrupts
from sojourn.metrics.prediction import Change
from sojourn.replay.fleet.simulate import FleetAnswers, FleetReplay, FleetServers
from sojourn.replay.fleet.traffic import FleetTraffic, TracedRequest
from sojourn.replay.outcome import Answers, figures
from sojourn.replay.routing import make_routing

BIG = 20_000  # requests: fewer are replayed in this process


class FleetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One routing policy. Shares are 0 to 1; NaN where there is none."""

    routing: str
    replicas: int
    requests: int
    rate_rps: float  # that were sent
    refused: int
    attainment: float
    goodput_rps: float
    output_tokens_per_s: float
    ttft_ms: dict[str, float]  # p50, p90, p99
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    hit_rate: float  # cached prompt tokens over all prompt tokens
    pooled_hit_rate: float  # of one cache of all replicas without eviction
    load_max_over_mean: float  # requests of the replica with most, over the mean
    hit_rate_lowest: float  # of a replica
    hit_rate_highest: float
    preemptions: int
    steps: int
    extrapolated: float  # share of the device's time in steps larger or smaller than those of the run
    replay_seconds: float  # wall clock


class FleetQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet to replay."""

    replicas: int
    num_requests: int
    rate: float | None  # requests per second; None: the trace's own for each copy of it
    change: Change
    objectives: Sequence[dict[str, Any]] | None


def fleet_answers(
    servers: FleetServers, config: EngineConfig, rows: Sequence[TracedRequest], question: FleetQuestion,
    routings: Sequence[str], processes: int,
) -> list[FleetAnswer]:  # fmt: skip
    """One answer a policy, in their order.

    A policy whose choices follow from the arrivals alone is replayed in several processes, each with its part of the
    replicas. The others need one process each.
    """
    traffic = FleetTraffic(rows, question.num_requests, question.rate, config.block_size)
    pooled = traffic.pooled_hit_tokens() / max(1, int(traffic.prompt_tokens.sum()))
    processes = processes if question.num_requests >= BIG else 1
    jobs = [
        (routing, part, parts)
        for routing in routings
        for parts in [min(processes, question.replicas) if not _routing(config, question, routing).sees_ends else 1]
        for part in range(parts)
    ]
    found: dict[str, list[tuple[FleetAnswers, float]]] = {}
    shared = (servers, dict(config), rows, question)
    if processes > 1 and len(jobs) > 1:
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of pyarrow
        with own_interrupts():
            workers = context.Pool(min(processes, len(jobs)), _begin, shared)
        with workers as pool:
            answers = pool.starmap(_replay, jobs, chunksize=1)
    else:
        _begin(*shared, traffic=traffic)
        answers = [_replay(*job) for job in jobs]
    for (routing, _, _), answer in zip(jobs, answers, strict=True):
        found.setdefault(routing, []).append(answer)
    return [_answer(routing, found[routing], traffic, pooled, question) for routing in routings]


_job: tuple[FleetServers, EngineConfig, FleetTraffic, FleetQuestion] | None = None  # of this process


def _begin(
    servers: FleetServers, settings: dict[str, Any], rows: Sequence[TracedRequest], question: FleetQuestion,
    traffic: FleetTraffic | None = None,
) -> None:  # fmt: skip
    global _job
    config = EngineConfig.model_validate({name: value for name, value in settings.items() if value is not None})
    traffic = traffic or FleetTraffic(rows, question.num_requests, question.rate, config.block_size)
    _job = servers, config, traffic, question


def _routing(config: EngineConfig, question: FleetQuestion, name: str):
    assert config.num_kv_blocks is not None
    return make_routing(name, question.replicas, max_num_seqs=config.max_num_seqs, num_blocks=config.num_kv_blocks)


def _replay(routing: str, part: int, parts: int) -> tuple[FleetAnswers, float]:
    assert _job is not None, "a process begins with `_begin`"
    servers, config, traffic, question = _job
    begin = time.monotonic()
    policy = _routing(config, question, routing)
    kept = range(part, question.replicas, parts)
    return FleetReplay(servers, config, question.change, traffic, policy, kept).run(), time.monotonic() - begin


def _answer(
    name: str, parts: Sequence[tuple[FleetAnswers, float]], traffic: FleetTraffic, pooled: float,
    question: FleetQuestion,
) -> FleetAnswer:  # fmt: skip
    whole = parts[0][0]
    for part, _ in parts[1:]:
        own = part.replica >= 0
        for column in ("first_ns", "last_ns", "replica", "is_refused", "cached_tokens"):
            getattr(whole, column)[own] = getattr(part, column)[own]
    measured = figures(_as_answers(whole, traffic), question.objectives, None)
    prompts = np.bincount(whole.replica, traffic.prompt_tokens, question.replicas)
    hits = np.bincount(whole.replica, whole.cached_tokens, question.replicas)
    share = hits[prompts > 0] / prompts[prompts > 0]
    requests = np.bincount(whole.replica, minlength=question.replicas)
    device_ns = sum(part.device_ns for part, _ in parts)
    return FleetAnswer(
        routing=name,
        replicas=question.replicas,
        requests=len(traffic),
        rate_rps=traffic.rate,
        refused=int(whole.is_refused.sum()),
        attainment=measured["attainment"],
        goodput_rps=measured["goodput_rps"],
        output_tokens_per_s=measured["output_tokens_per_s"],
        **{
            latency: {label.partition(":")[2]: value for label, value in measured.items() if label.startswith(latency)}
            for latency in ("ttft_ms", "tpot_ms", "e2e_ms")
        },
        hit_rate=float(hits.sum() / max(1.0, prompts.sum())),
        pooled_hit_rate=pooled,
        load_max_over_mean=float(requests.max() / max(1e-9, requests.mean())),
        hit_rate_lowest=float(share.min(initial=1.0)),
        hit_rate_highest=float(share.max(initial=0.0)),
        preemptions=sum(part.preemptions for part, _ in parts),
        steps=sum(part.steps for part, _ in parts),
        extrapolated=sum(part.extrapolated_ns for part, _ in parts) / device_ns if device_ns else 0.0,
        replay_seconds=max(spent for _, spent in parts),
    )


def _as_answers(found: FleetAnswers, traffic: FleetTraffic) -> Answers:
    served = ~np.isnan(found.last_ns)
    later = traffic.output_tokens - 1
    counts = later > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(served & counts, (found.last_ns - found.first_ns) / 1e6 / later, np.nan)
    return Answers(
        klass=np.full(len(served), "", dtype=object),
        served=served,
        tpot_counts=counts,
        ttft_ms=(found.first_ns - traffic.due_ns) / 1e6,
        tpot_ms=tpot,
        e2e_ms=(found.last_ns - traffic.due_ns) / 1e6,
        due_ns=traffic.due_ns,
        last_ns=found.last_ns,
        output_tokens=np.where(served, traffic.output_tokens, 0).astype(float),
    )
