"""Readings of the device, its host and the processes beside it."""

from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.launch_facts import FEWEST_STEPS
from sojourn.diagnosis.rules.shared_evidence import SLOW_DEVICE
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading
from sojourn.metrics.compute.speed_facts import stored_entries
from sojourn.metrics.run.directory import section, server_hardware


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


def launches(facts: Facts) -> Reading | None:
    """Of a GPU, whether decode steps were launched kernel by kernel."""
    device = str(section(facts.meta, "core").get("device") or "")
    if device.startswith("cpu"):
        return Reading("the device is a CPU: no kernel is launched from afar", True, "run.json: core")
    if not device or facts.steps is None:
        return None
    found, source = facts.launches, "steps: graph, stage_launch_ns, device_ns"
    if found is None:
        return Reading(f"fewer than {FEWEST_STEPS} decode steps were launched kernel by kernel", True, source)
    return Reading(
        f"{found.eager_share:.0%} of the device time of decode steps is in steps without a graph, and to launch them "
        f"takes the host {found.launch_share:.0%} of it",
        found.eager_share < NEGLIGIBLE,
        source,
        found.eager_share,
    )


def threads(facts: Facts) -> Reading | None:
    used, cores = facts.engine.get("threads"), server_hardware(facts.meta).get("cores")
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


def exchanges(facts: Facts) -> Reading | None:
    """One process exchanges nothing."""
    group = facts.group()
    share = 0.0 if group is None else group.communication_share
    if group is None and facts.steps is None:
        return None
    return Reading(
        f"exchanges between ranks take {share:.0%} of the steps' time" if group else "one process computes the model",
        share < NEGLIGIBLE,
        "steps: communication_ns",
        share,
    )


def stage_waits(facts: Facts) -> Reading | None:
    """One stage waits for none."""
    group = facts.group()
    if group is None and facts.steps is None:
        return None
    worst = 0.0 if group is None else max(group.bubble_shares)
    return Reading(
        f"a pipeline stage waits for another one in {worst:.0%} of its time" if group else "there is one stage",
        worst < NEGLIGIBLE,
        "steps: rank_bubble_ns",
        worst,
    )


def slowest_rank(facts: Facts) -> Reading | None:
    """One process waits for none."""
    group = facts.group()
    if group is None and facts.steps is None:
        return None
    lost = 0.0 if group is None else max(0.0, group.slowest.lost_share)
    return Reading(
        f"ranks wait for rank {group.slowest.rank} in {lost:.0%} of the steps' time" if group else "there is one rank",
        lost < NEGLIGIBLE,
        "steps: rank_busy_ns",
        lost,
    )


def expert_ranks(facts: Facts) -> Reading | None:
    """Where each rank holds all experts, or a part of each, none has more tokens than another."""
    group = facts.group()
    if group is None and facts.steps is None:
        return None
    uneven = None if group is None else group.expert_imbalance
    if uneven is None:
        return Reading("no rank holds experts of its own", True, "run.json: engine.expert_parallel", 1.0)
    return Reading(
        f"the experts of the busiest rank have {uneven:.2f} times the mean of the tokens",
        uneven - 1 < NEGLIGIBLE,
        "steps: expert_tokens",
        uneven,
    )


def slowest_server(facts: Facts) -> Reading | None:
    """Of a fleet, by steps of the same size."""
    fleet = facts.fleet()
    if fleet is None or (slow := fleet.slowest) is None:
        return None
    times = slow.slowdown or 1.0
    return Reading(
        f"{slow.name} takes {times:.2f} times as long as the other servers for the same steps",
        times < 1 + NEGLIGIBLE,
        "steps of each server: device_ns, new_tokens, past_tokens",
        min(1.0, max(0.0, 1 - 1 / times)),
    )
