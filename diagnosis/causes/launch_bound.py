"""The device waits for the host to launch each kernel of a decode step, because no graph is replayed."""

from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.launch_facts import FEWEST_STEPS
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements.device import WORTH_MENDING
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading
from sojourn.metrics.run.directory import section

DECODE = "compute.decode"
LAUNCHED = "steps: stage_launch_ns, device_ns, graph, request_ids"
MOSTLY = 0.5
WAITS_FOR_LAUNCHES = 0.8  # launching / device time: a device that is the slower one lets the host run ahead
IN_A_GRAPH = 2.0  # a launch takes the host some 4 µs, and the next kernel of a graph starts after less than 2


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    found, speed = facts.launches, facts.speed()
    if found is None or found.eager_share < MOSTLY or found.launch_share < WAITS_FOR_LAUNCHES:
        return None
    known = [each for each in (speed.others if speed is not None else []) if "graphs" in each.settings]
    factor = known[0].speedup if known else IN_A_GRAPH
    if factor < 1 + WORTH_MENDING:
        return None
    lost = found.eager_share * (1 - 1 / factor)
    is_off = facts.engine.get("graphs") == "off"
    return Proposal(
        cause=f"decode steps are launched kernel by kernel, and the device waits for it: {found.step_ms:.1f} ms a step"
        + (", as graphs are off" if is_off else ", as no graph fits them"),
        evidence=[
            evidence(f"the host launches for {found.launch_share:.0%} of the device's time in these steps: no kernel "
                     "is ready before the one before it ends", found.launch_share, "ratio", LAUNCHED, weight=3),
            evidence(f"{found.eager_share:.0%} of the device time of decode steps is in steps that replay no graph",
                     found.eager_share, "share", "steps: graph, device_ns", weight=1),
            evidence(f"{found.fixed_share:.0%} of such a step does not grow with its sequences", found.fixed_share,
                     "share", LAUNCHED, supports=found.fixed_share >= MOSTLY, weight=1),
            *([evidence(f"with graphs the same steps take {1 / factor:.0%} of the time", factor, "ratio",
                        "run.json: speed_reference", weight=2)] if known else []),
            *excess_evidence(excess, (DECODE,)),
        ],
        measurement="the same scenario with graphs, or `POST /debug/profile`: gaps between the kernels of a step",
        settings={"graphs": "on"},
        if_cause=f"decode steps take about {found.step_ms / factor:.1f} ms",
        if_rival=f"decode steps take {found.step_ms:.1f} ms with graphs, too",
        change="graphs=on (with graphs=auto, the log says why they could not be captured)",
        claims={DECODE: lost} | dict.fromkeys(CONTENTION, lost),
        fixes=(Change(settings={"graphs": "on"}, device_speed=1 / max(1 - lost, 0.1)),),
    )  # fmt: skip


def show_launches(facts: Client) -> Reading | None:
    """Of a GPU, whether decode steps were launched kernel by kernel."""
    device = str(section(facts.meta, "core").get("device") or "")
    if device.startswith("cpu"):
        return Reading("the device is a CPU: no kernel is launched from afar", True, "run.json: core")
    if not device or not isinstance(facts, Records) or facts.steps is None:
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


CAUSE = Cause(
    key="launch_bound",
    lifecycles=("compute",),
    object="launches of kernels",
    kind="policy",
    rival="a slow device: it would be slow in steps with prompts, too",
    rival_key="slow_device",
    name="kernel launches",
    asks="Do launches take longer than kernels?",
    measurement="the same scenario with graphs",
    figures=(show_launches,),
    complaints={"high_ttft": 5, "high_itl": 7, "low_device_utilisation": 2, "devices_do_not_help": 2},
    reads={Records: Rule(read_records, accounts=(DECODE,), needs=("excess", "steps"))},
)
