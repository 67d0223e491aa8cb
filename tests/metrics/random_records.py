"""Random records for whoever folds them: every field takes part, and the invariants of real ones hold."""

from collections import Counter
from collections.abc import Sequence
from random import Random

from sojourn.metrics.ledger import SERVER_ACCOUNTS, new_ledger
from sojourn.metrics.machine.sampler import THROTTLE_REASONS
from sojourn.metrics.memory.kv_load import TIERS
from sojourn.metrics.memory.prefix_outcomes import PREFIX_OUTCOMES, RATIOS
from sojourn.metrics.records import (
    ACTIVITIES,
    COLLECTIVES,
    KINDS,
    LEASE_ENDS,
    REFUSALS,
    STAGES,
    UNDRAFTED,
    WAITS,
    RequestRecord,
    StepRecord,
    SystemRecord,
)

MS = 1_000_000


TIER_SUMS = (
    "tier_loaded_bytes", "tier_stored_bytes", "tier_load_ns", "tier_store_ns", "tier_failures", "tier_refused",
)  # fmt: skip


def random_step(rng: Random, step: int = 0) -> StepRecord:
    """A step whose stages sum to its wall time. One in four is of one kind only."""
    kinds = KINDS if rng.random() < 0.75 else (rng.choice(KINDS),)
    batch = [(f"r{index}", rng.randint(1, 300), rng.randint(0, 4000), rng.choice(kinds)) for index in range(8)]
    batch = batch[: rng.randint(1, 8)]
    stages = [rng.randint(0, 3 * MS) for _ in STAGES]
    begin_ns = step * 100 * MS
    device_ns = rng.randint(1, 20 * MS)
    flops = [rng.randint(0, 10**15) for _ in range(3)]
    preempted = [f"p{index}" for index in range(rng.randint(0, 2))]
    return StepRecord.of(
        step=step, begin_ns=begin_ns, end_ns=begin_ns + sum(stages), stages=stages, device_ns=device_ns,
        request_ids=[item[0] for item in batch], new_tokens=[item[1] for item in batch],
        past_tokens=[item[2] for item in batch], kinds=[item[3] for item in batch],
        padding_tokens=rng.randint(0, 64), graph=rng.choice(["eager", "8", "16"]), budget=8 * 300,
        waiting=rng.randint(1, 20), refusals={reason: rng.randint(1, 9) for reason in rng.sample(REFUSALS, 2)},
        preempted_ids=preempted,
        preempted_for=[rng.choice(["r0", victim]) for victim in preempted],
        preempted_tokens=[rng.randint(0, 500) for _ in preempted], evicted_blocks=rng.randint(0, 5),
        blocks_free=rng.randint(1, 100), blocks_active=rng.randint(0, 100), blocks_reusable=rng.randint(0, 100),
        flops=sum(flops),
        flops_attention=flops[0], flops_mlp=flops[1], flops_head=flops[2],
        bytes=rng.randint(1, 10**12),
        predicted_ns=rng.choice([None, device_ns, rng.randint(1, 20 * MS)]),
        slots_written=rng.randint(0, 100), shadow_evicted_blocks=rng.randint(0, 2), reuse_gap_ns=_sample(rng, 10**10),
        reuse_distance_blocks=_sample(rng, 500), evicted_age_ns=_sample(rng, 10**10),
        evicted_idle_ns=_sample(rng, 10**9),
        entropy_millinats=_sample(rng, 9000), nucleus_mass_ppm=_sample(rng, 10**6), logit_rows=rng.randint(0, 9),
        gap_ns=rng.randint(0, MS), overrun_tokens=rng.randint(0, 3), emitted_tokens=rng.randint(0, 8),
        load_ns=rng.randint(0, MS), store_ns=rng.randint(0, MS),
        leases_ended={end: rng.randint(0, 9) for end in LEASE_ENDS},
        tier_blocks={tier: rng.randint(1, 99) for tier in TIERS},
        **{field: {tier: rng.randint(0, 10**6) for tier in TIERS} for field in TIER_SUMS},
        **_drafts(rng), **_exchanges(rng),
    )  # fmt: skip


def _drafts(rng: Random) -> dict:
    drafted = sorted((rng.randint(1, 8) for _ in range(rng.randint(0, 4))), reverse=True)
    accepted = sorted((rng.randint(0, count) for count in drafted), reverse=True)
    return {
        "drafted_by_position": drafted, "accepted_by_position": accepted, "drafted_tokens": sum(drafted),
        "accepted_tokens": sum(accepted), "drafts_wanted": rng.randint(0, 9), "draft_ns": rng.randint(0, MS),
        "draft_flops": rng.randint(0, 10**12), "draft_bytes": rng.randint(0, 10**12),
        "undrafted": {rng.choice(UNDRAFTED): rng.randint(1, 9)},
    }  # fmt: skip


def _exchanges(rng: Random) -> dict:
    """Those of two ranks."""
    return {
        "communication_ns": rng.randint(0, MS), "bubble_ns": rng.randint(0, MS),
        "exchanged_bytes": {name: rng.randint(1, 10**6) for name in COLLECTIVES},
        "exchange_ns": {name: rng.randint(1, MS) for name in COLLECTIVES},
        "exchange_hidden_ns": {name: rng.randint(0, MS) for name in ("send", "recv")},
        "expert_tokens": [rng.randint(0, 99) for _ in range(4)],
        "expert_imbalance_percent": [rng.randint(100, 400) for _ in range(2)],
        **{f"rank_{activity}_ns": [rng.randint(1, MS), rng.randint(1, MS)] for activity in ACTIVITIES},
    }  # fmt: skip


def random_request(rng: Random, index: int = 0) -> RequestRecord:
    """A request that ended in any way, with a ledger that closes in most cases."""
    arrived_ns = rng.randint(0, 10**12)
    ledger = new_ledger()
    ttft = new_ledger()
    for info in SERVER_ACCOUNTS:
        ledger[info.account] = rng.randint(0, 50 * MS)
        ttft[info.account] = rng.randint(0, ledger[info.account])
    outcome = rng.choice(["stop", "length", "abort", "error"])
    ran = outcome in ("stop", "length") or rng.random() < 0.5
    tokens = rng.randint(1, 40) if ran else 0
    token_ns = sorted(arrived_ns + rng.randint(0, 900 * MS) for _ in range(tokens))
    written_ns = arrived_ns + sum(ledger) + rng.choice([0, 0, 0, 5 * MS, -5 * MS])
    prompt = rng.randint(1, 5000)
    return RequestRecord(
        request_id=f"r{index}", arrived_ns=arrived_ns, finished_ns=written_ns, tenant=rng.choice(["", "a"]),
        klass=rng.choice(["", "chat", "batch"]), finish_reason=None if outcome == "error" else outcome,
        error="the core died" if outcome == "error" else None, prompt_tokens=prompt,
        cached_tokens=rng.randint(0, prompt) if ran else 0, computed_tokens=rng.randint(0, prompt) if ran else 0,
        recomputed_tokens=rng.randint(0, 99) if ran else 0, output_tokens=tokens, drafted_tokens=rng.randint(0, 9),
        accepted_tokens=rng.randint(0, 5), rejected_ns=rng.randint(0, MS), preemptions=rng.randint(0, 2) if ran else 0,
        first_step=index if ran else None, last_step=index + tokens if ran else None, token_ns=token_ns,
        written_ns=written_ns if ran else None, first_written_ns=arrived_ns + sum(ttft) if ran else None,
        ledger=ledger, ttft=ttft,
        encoded_ns=arrived_ns + 1000, queued_ns=arrived_ns + 2000, scheduled_ns=arrived_ns + 3000 if ran else None,
        longest_output_tokens=tokens, prompt_characters=4 * prompt, output_characters=rng.randint(0, 5 * tokens),
        prefix_outcomes=_split(rng, prompt, PREFIX_OUTCOMES) if ran else {}, infinite_hit_tokens=rng.randint(0, prompt),
        waits=_split(rng, 70 * MS, WAITS), evicted_ago_ns=rng.choice([None, rng.randint(0, 10**10)]),
        resized_hit_tokens=sorted(rng.randint(0, prompt) for _ in range(rng.randint(0, len(RATIOS)))) if ran else [],
        prefix_source=rng.choice([None, f"r{index - 1}"]), prefix_shared_tokens=rng.randint(0, prompt) if ran else 0,
        repeated_tokens=rng.randint(0, prompt), movable_tokens=rng.randint(0, prompt),
        prompt_block_hashes=[rng.randint(-(2**63), 2**63 - 1) for _ in range(3)],
        output_block_hashes=[rng.randint(-(2**63), 2**63 - 1) for _ in range(2)],
    )  # fmt: skip


def random_system(rng: Random, second: int = 0) -> SystemRecord:
    """One second of a machine that has every sensor."""
    return SystemRecord(
        ns=second * 1000 * MS, host_cpu_percent=rng.uniform(0, 100), front_cpu_percent=rng.uniform(0, 100),
        core_cpu_percent=rng.uniform(0, 200), core_rss_bytes=rng.randint(1, 2**34), host_available_bytes=2**33,
        gpu_utilisation_percent=rng.uniform(0, 100), gpu_memory_used_bytes=rng.randint(0, 2**36),
        gpu_power_watts=rng.uniform(50, 700), gpu_sm_clock_mhz=rng.uniform(200, 1980),
        gpu_memory_clock_mhz=2619.0, gpu_temperature_celsius=rng.uniform(30, 80),
        gpu_throttle_reasons=rng.sample(sorted(THROTTLE_REASONS.values()), 2), cpu_power_watts=rng.uniform(20, 300),
        front_cpu_seconds=0.2 * second, core_cpu_seconds=0.9 * second, front_rss_bytes=rng.randint(1, 2**31),
        host_steal_percent=rng.uniform(0, 40),
    )  # fmt: skip


def _sample(rng: Random, highest: int) -> list[int]:
    return [rng.randint(0, highest) for _ in range(rng.choice([0, 0, 1, 3]))]


def _split(rng: Random, whole: int, names: Sequence[str]) -> dict[str, int]:
    """Parts that sum to the whole, some of them left out."""
    parts: Counter[str] = Counter()
    for _ in range(4):
        taken = rng.randint(0, whole)
        parts[rng.choice(names)] += taken
        whole -= taken
    parts[names[0]] += whole
    return dict(parts)
