"""Readings of the load, of the order in which it is served, of the front process and of the client."""

from dataclasses import replace

from sojourn.diagnosis.capacity import COMFORTABLE, FULL, best_load
from sojourn.diagnosis.facts import VARIED, Facts, tightest
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Read, Reading, account, waiting_for

LONG_PROMPT = 4.0  # times the median prompt: it fills steps that the others would share
REFUSED = ("429", "queue is full", "rate limit", "quota")  # words of an error that refuses a request
DIED = ("core", "died", "connection")  # words of an error of a server that stopped


def front_busy(facts: Facts) -> Reading | None:
    """Of the event loop; without its records, what text waits to be written."""
    if facts.machine is None or facts.machine.front is None:
        return account("request.stream")(facts)
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
    """Of the event loop; without its records, what text waits to be written."""
    if facts.machine is None or facts.machine.front is None:
        return account("request.stream")(facts)
    loop = facts.machine.front
    return Reading(
        f"{loop.long_turns} turns of the front's event loop took 10 ms or more, {loop.longest_ms:,.0f} ms at most: "
        f"{loop.long_share:.0%} of the time",
        loop.long_share < NEGLIGIBLE,
        "system: front turns",
        min(1.0, loop.long_share),
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


def servers_unequal(facts: Facts) -> Reading | None:
    """One server chooses none."""
    fleet = facts.fleet()
    if fleet is None:
        return None
    return Reading(
        f"{fleet.busiest.name} had {fleet.imbalance:.2f} times the mean of the servers' requests",
        fleet.imbalance < 1 + NEGLIGIBLE,
        "requests: server, arrived_ns, finished_ns",
        min(1.0, fleet.imbalance - 1),
    )
