"""One figure of a run that speaks for or against an object of a symptom tree. Each function returns None where the
evidence is missing."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from metrics.diagnosis.capacity import COMFORTABLE, FULL, best_load
from metrics.diagnosis.facts import VARIED, Facts, tightest
from metrics.diagnosis.memory_facts import prompt_order
from metrics.diagnosis.rules.shared_evidence import SLOW_DEVICE
from metrics.diagnosis.speed_facts import stored_entries
from metrics.ledger import ACCOUNT_BY_NAME

# Below a tenth, an account or a reason is not what a user feels: nine tenths of the delay would remain without it.
NEGLIGIBLE = 0.10
LONG_PROMPT = 4.0  # times the median prompt: it fills steps that the others would share
REFUSED = ("429", "queue is full", "rate limit", "quota")  # words of an error that refuses a request
DIED = ("core", "died", "connection")  # words of an error of a server that stopped


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured fact in words. `rules_out`: its size excludes the object; `share` (0 to 1) draws a bar."""

    statement: str
    rules_out: bool
    source: str  # table and columns
    share: float | None = None


Read = Callable[[Facts], Reading | None]


def account(name: str) -> Read:
    """The share of all requests' time that one account holds, and what it takes of a request."""

    def read(facts: Facts) -> Reading | None:
        info = ACCOUNT_BY_NAME[name]
        column = f"ledger_{info.column}"
        served = facts.rows[facts.rows.status == "ok"]
        if not len(served) or not served[column].notna().any():
            return None
        ms = float(served[column].astype("float64").mean()) / 1e6
        share = ms / max(float(served.e2e_ms.astype("float64").mean()), 1e-9)
        return Reading(
            f"{name} takes {ms:,.1f} ms of a request, {share:.0%} of its latency",
            share < NEGLIGIBLE / 10,
            f"requests: {column}",
            share,
        )

    return read


def waiting_for(reason: str, what: str) -> Read:
    def read(facts: Facts) -> Reading | None:
        if not facts.joined:
            return None
        share = facts.waits.get(reason, 0.0)
        return Reading(f"{share:.0%} of the waiting was for {what}", share < NEGLIGIBLE, "requests: waits", share)

    return read


def prefix_outcome(*outcomes: str, what: str) -> Read:
    def read(facts: Facts) -> Reading | None:
        if facts.prefix is None:
            return None
        share = sum(facts.prefix.outcomes.get(outcome, 0.0) for outcome in outcomes)
        return Reading(
            f"{share:.0%} of the prompt tokens {what}", share < NEGLIGIBLE, "requests: prefix_outcomes", share
        )

    return read


def kv_pool(facts: Facts) -> Reading | None:
    if facts.steps is None:
        return None
    steps, waits = facts.steps, facts.waits.get("kv_blocks", 0.0)
    return Reading(
        f"KV use peaks at {steps.kv_use_max:.0%} of {steps.pool_blocks:,} blocks, with {steps.preemptions} preemptions "
        f"and {waits:.0%} of the waiting for blocks",
        steps.preemptions == 0 and waits < NEGLIGIBLE,
        "steps: blocks_*, preempted_ids; requests: waits",
        steps.kv_use_max,
    )


def evictions_hurt(facts: Facts) -> Reading | None:
    return prefix_outcome("miss_evicted", what="were in the cache once and had been evicted")(facts)


def prefixes_repeat(facts: Facts) -> Reading | None:
    """What a cache without limit would have hit, against what was hit."""
    if facts.cached_share is None:
        return None
    ideal = max(facts.prefix.infinite if facts.prefix is not None else 0.0, facts.declared_shared_share)
    gap = max(0.0, ideal - facts.cached_share)
    return Reading(
        f"{facts.cached_share:.0%} of the prompt tokens came from the cache, and a cache without limit "
        f"would have had {ideal:.0%}",
        gap < NEGLIGIBLE,
        "requests: cached_tokens, infinite_hit_tokens",
        gap,
    )


def prefix_cache_is_on(facts: Facts) -> Reading | None:
    setting = facts.engine.get("prefix_caching")
    if setting is None:
        return None
    found = prefixes_repeat(facts)
    if setting:
        return Reading("prefix_caching is on", True, "run.json: engine")
    return found and Reading(f"prefix_caching is off; {found.statement}", found.rules_out, found.source, found.share)


def shared_part_comes_late(facts: Facts) -> Reading | None:
    """What prompts have in common behind something that differs."""
    found = prompt_order(facts.rows) if facts.joined else None
    if found is None:
        return prefix_outcome("miss_diverged", what="follow a part that differs")(facts)
    return Reading(
        f"{found.movable_share:.0%} of the prompt tokens stood in an earlier prompt, behind a part that differs",
        found.movable_share < NEGLIGIBLE,
        "requests: movable_tokens, prefix_shared_tokens",
        found.movable_share,
    )


def half_blocks(facts: Facts) -> Reading | None:
    """A request leaves half a block empty on average."""
    size = facts.engine.get("block_size")
    if not size or facts.work is None:
        return None
    tokens = facts.work.prompt_tokens + facts.work.output_tokens
    share = size / 2 / (size / 2 + tokens)
    return Reading(
        f"half a block of {size} slots is {share:.0%} of what a request of {tokens:,.0f} tokens takes",
        share < NEGLIGIBLE,
        "run.json: block_size; requests: prompt_tokens, output_tokens",
        share,
    )


def device_slowdown(facts: Facts) -> Reading | None:
    """Against normal speed where it is known; else only against the rest of the run, which rules no slow whole out."""
    speed = facts.speed() if stored_entries(facts.meta) else None  # without a reference it is costly, and not asked
    if speed is not None and speed.source == "reference":
        worst = max(speed.quarters, default=speed.device.slowdown)
        return Reading(
            f"the device takes {speed.device.slowdown:.2f} times its normal time, {worst:.2f} times in a quarter",
            worst < SLOW_DEVICE,
            "steps: device_ns; run.json: speed reference",
            max(0.0, 1 - 1 / max(worst, 1e-9)),
        )
    if facts.steps is None or facts.steps.worst_slowdown is None:
        return None
    worst = facts.steps.worst_slowdown
    return Reading(
        f"in the slowest quarter of the run steps took {worst:.2f} times what their composition explains",
        worst < SLOW_DEVICE,
        "steps: device_ns, predicted_ns",
        max(0.0, 1 - 1 / max(worst, 1e-9)),
    )


def neighbours(facts: Facts) -> Reading | None:
    """Whether the engine waited for cores that other processes had."""
    machine = facts.machine
    if machine is None or machine.core_queued is None:
        return steal(facts)
    worst = machine.core_queued_worst or machine.core_queued
    others = "" if machine.others_cores is None else f", and other processes used {machine.others_cores:.1f} cores"
    return Reading(
        f"the engine waited for a core in {worst:.0%} of its time in the worst quarter{others}",
        worst < NEGLIGIBLE,
        "system: core_queued_ns, *_cpu_seconds",
        min(1.0, worst),
    )


def front_busy(facts: Facts) -> Reading | None:
    if facts.machine is None or facts.machine.front is None:
        return None
    loop = facts.machine.front
    return Reading(
        f"the front's event loop is busy {loop.busy:.0%} of the time, {loop.busy_worst:.0%} in its worst second",
        loop.busy_worst < COMFORTABLE,
        "system: front turns",
        min(1.0, loop.busy),
    )


def in_the_front(noun: str, what: str) -> Read:
    """Text work that holds the front's event loop. Its cost stands in other accounts, too: whoever waits for the loop
    books `request.stream` or `request.admission`. Without the loop's records it can therefore not be excluded."""

    def read(facts: Facts) -> Reading | None:
        booked = account(f"token.{noun}")(facts)
        if booked is None:
            return None
        if facts.machine is None or facts.machine.front is None:
            return replace(booked, rules_out=False)
        loop = facts.machine.front
        part = {"encode": loop.encoding, "decode": loop.decoding}[noun]
        return Reading(
            f"{what} takes {part:.0%} of the busy time of the front's event loop, which is busy {loop.busy:.0%} of the "
            "time",
            part * loop.busy < NEGLIGIBLE and booked.rules_out,
            "system: front turns; requests: encoding_ns, decoding_ns",
            min(1.0, part * loop.busy),
        )

    return read


def front_blocked(facts: Facts) -> Reading | None:
    if facts.machine is None or facts.machine.front is None:
        return None
    loop = facts.machine.front
    return Reading(
        f"{loop.long_turns} turns of the front's event loop took 10 ms or more, {loop.longest_ms:,.0f} ms at most: "
        f"{loop.long_share:.0%} of the time",
        loop.long_share < NEGLIGIBLE,
        "system: front turns",
        min(1.0, loop.long_share),
    )


def host_time(facts: Facts) -> Reading | None:
    if facts.steps is None:
        return None
    share = facts.steps.host_share
    return Reading(
        f"the host keeps the device waiting for {share:.0%} of the time of steps",
        share < NEGLIGIBLE,
        "steps: stage_*_ns, device_ns",
        share,
    )


def decode_step(facts: Facts) -> Reading | None:
    bound = tightest(facts, "tpot_ms")
    if facts.steps is None or facts.steps.decode_step_p50_ns is None or bound is None:
        return None
    ms = facts.steps.decode_step_p50_ns / 1e6
    return Reading(
        f"a step with decodes only takes {ms:,.1f} ms, and the objective allows {bound:,.0f} ms",
        ms < bound,
        "steps: begin_ns, end_ns, kinds",
        min(1.0, ms / bound),
    )


def mixed_step(facts: Facts) -> Reading | None:
    if facts.steps is None:
        return None
    if facts.steps.prefill_step_p95_ns is None:
        return Reading("no step held prompts beside decodes", True, "steps: kinds")
    ms, plain = facts.steps.prefill_step_p95_ns / 1e6, (facts.steps.decode_step_p50_ns or 0) / 1e6
    bound = tightest(facts, "tpot_ms")
    within = ms < bound if bound is not None else ms < 2 * plain
    return Reading(
        f"a step with prompts beside decodes takes {ms:,.0f} ms (p95), one with decodes only {plain:,.0f} ms",
        within,
        "steps: begin_ns, end_ns, kinds",
    )


def batch(facts: Facts) -> Reading | None:
    cap = facts.engine.get("max_num_seqs")
    if facts.steps is None or not cap:
        return None
    share = facts.steps.mean_batch / cap
    return Reading(
        f"{facts.steps.mean_batch:.1f} requests run together on average, of {cap} that may",
        False,
        "steps: request_ids; run.json: max_num_seqs",
        min(1.0, share),
    )


def large_batch(facts: Facts) -> Reading | None:
    found, step = batch(facts), decode_step(facts)
    if found is None or step is None:
        return found
    return Reading(f"{found.statement}; {step.statement}", step.rules_out, f"{found.source}; {step.source}", step.share)


def device_kind(facts: Facts) -> Reading | None:
    device = str(facts.engine.get("device") or "")
    if not device:
        return None
    if device.startswith("cpu"):
        return Reading("the device is a CPU: no kernel is launched from afar", True, "run.json: device")
    return host_time(facts)


def threads(facts: Facts) -> Reading | None:
    used, hardware = facts.engine.get("threads"), facts.meta.get("server_hardware") or facts.meta.get("hardware") or {}
    cores = hardware.get("cores") if isinstance(hardware, dict) else None
    if not isinstance(used, int) or not isinstance(cores, int):
        return None
    return Reading(f"{used} of {cores} cores compute", used >= cores, "run.json: threads, hardware", 1 - used / cores)


def steal(facts: Facts) -> Reading | None:
    if facts.steal is None:
        return None
    share = facts.steal.mean / 100
    return Reading(
        f"the hypervisor gave {share:.0%} of the CPU time to other machines", False, "system: host_steal_percent", share
    )


def arrivals(facts: Facts) -> Reading | None:
    if facts.arrivals is None:
        return None
    cv = facts.arrivals.cv
    return Reading(
        f"the gaps between arrivals vary with a coefficient of {cv:.1f} (independent arrivals: 1.0)",
        cv < VARIED,
        "client: due_ns",
    )


def offered_load(facts: Facts) -> Reading | None:
    load = best_load(facts)
    if load != load:
        return None
    return Reading(
        f"the offered load is {load:.0%} of what this device serves at its best batch",
        load < FULL,
        "client: due_ns; steps: fit of wall time",
        min(1.0, load),
    )


def refusals(facts: Facts) -> Reading | None:
    if not facts.sent:
        return None
    count = sum(n for error, n in facts.errors.items() if any(word in error.lower() for word in REFUSED))
    share = count / facts.sent
    return Reading(f"{count} of {facts.sent} requests were refused", count == 0, "client: status, error", share)


def crashes(facts: Facts) -> Reading | None:
    if not facts.sent:
        return None
    count = sum(n for error, n in facts.errors.items() if any(word in error.lower() for word in DIED))
    return Reading(
        f"{count} of {facts.sent} requests ended with the server",
        count == 0,
        "client: status, error",
        count / facts.sent,
    )


def tenants(facts: Facts) -> Reading | None:
    if "tenant" not in facts.rows or not len(facts.rows):
        return None
    counts = facts.rows.tenant.fillna("").value_counts()
    share = float(counts.iloc[0] / len(facts.rows))
    if len(counts) == 1:
        return Reading("all requests are of one tenant", True, "client: tenant")
    return Reading(
        f"the largest of {len(counts)} tenants sends {share:.0%} of the requests", False, "client: tenant", share
    )


def longest_prompt(facts: Facts) -> Reading | None:
    tokens = facts.rows.server_prompt_tokens.astype("float64").fillna(facts.rows.prompt_tokens.astype("float64"))
    if not tokens.notna().any():
        return None
    longest, median = float(tokens.max()), float(tokens.median())
    return Reading(
        f"the longest prompt has {longest:,.0f} tokens, the median {median:,.0f}",
        longest < LONG_PROMPT * median,
        "requests: prompt_tokens",
    )


def output_lengths(facts: Facts) -> Reading | None:
    if tightest(facts, "e2e_ms") is None:
        return Reading("no objective bounds the end-to-end latency, so no answer is too long", True, "run.json")
    tokens = facts.rows.output_tokens.astype("float64").dropna()
    if not len(tokens):
        return None
    return Reading(
        f"an answer has {tokens.median():,.0f} tokens (median), a tenth has {tokens.quantile(0.9):,.0f} or more",
        False,
        "client: output_tokens",
    )


def order(facts: Facts) -> Reading | None:
    policy = facts.engine.get("policy")
    if policy is None:
        return None
    starved = 0.0 if facts.steps is None else facts.steps.starved_share
    return Reading(
        f"the order is {policy}; answers stood still for prompts in {starved:.0%} of the time of steps",
        policy == "fcfs" and starved < NEGLIGIBLE,
        "run.json: policy; steps: kinds, request_ids",
        starved,
    )


def chunk_limit(facts: Facts) -> Reading | None:
    chunk, budget = facts.engine.get("max_prefill_chunk_tokens"), facts.token_budget
    if budget is None:
        return None
    if not isinstance(chunk, int) or chunk >= budget:
        return Reading(f"no chunk limit is below the token budget of {budget}", True, "run.json: engine")
    taken = "" if facts.chunks is None else f"; a prompt took {facts.chunks.per_prompt:.1f} steps"
    return Reading(
        f"a prompt advances by at most {chunk} tokens a step, of a budget of {budget}{taken}",
        False,
        "run.json: max_prefill_chunk_tokens; steps: new_tokens",
        1 - chunk / budget,
    )


def long_prefill_limit(facts: Facts) -> Reading | None:
    found = waiting_for("policy", "the policy to admit them")(facts)
    policy = facts.engine.get("policy")
    return (
        found
        if found is None or policy is None
        else Reading(f"{found.statement} (policy {policy})", found.rules_out, found.source, found.share)
    )


def client_lag(facts: Facts) -> Reading | None:
    if facts.lag_p90_ms is None:
        return None
    bound = tightest(facts, "ttft_ms") or tightest(facts, "e2e_ms")
    share = None if bound is None else facts.lag_p90_ms / bound
    return Reading(
        f"the load generator sent late by {facts.lag_p90_ms:,.1f} ms (p90)",
        facts.lag_p90_ms < 1 if share is None else share < NEGLIGIBLE,
        "client: sent_ns, due_ns",
        share,
    )


def device_busy(facts: Facts) -> Reading | None:
    if facts.device_busy is None:
        return None
    return Reading(
        f"the device works {facts.device_busy:.0%} of the time in which a request is in the server",
        False,
        "steps: device_ns; requests: arrived_ns, finished_ns",
        facts.device_busy,
    )
