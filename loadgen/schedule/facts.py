"""What `run.json` says of the load before it is sent: the kind of loop, the traces, what was left out of them."""

from typing import Any

from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import arrivals_rng
from sojourn.loadgen.traces.agents import session_facts
from sojourn.loadgen.traces.blocks import clock_and_blocks
from sojourn.loadgen.traces.burstgpt import BURSTGPT
from sojourn.loadgen.traces.clock import told_unit
from sojourn.loadgen.traces.plain import SHAREGPT
from sojourn.loadgen.traces.reader import find_trace, form_of, read_trace
from sojourn.loadgen.traces.servegen import SERVEGEN

# Rows that vllm bench serve leaves out of a file of lengths, and we do not: its figures are of other requests.
VLLM_LEAVES_OUT = {
    BURSTGPT.name: "those of other models than GPT-4",
    SHAREGPT.name: "prompts above 1,024 tokens, prompts or answers below 4, and both together above 2,048",
}


def arrival_facts(scenario: Scenario, traces: dict[str, Any]) -> dict[str, Any]:
    """Facts about the arrivals; `told` has what a reader must know, in sentences. `traces` as in `workload_facts`."""
    arrivals, loop, notes = scenario.arrivals, "open", []
    quantised_into_s = traces.get(arrivals.file, {}).get("quantised_into_s") if arrivals.process == "trace" else None
    if arrivals.closed_loop is not None:
        loop = "closed"
        notes.append(
            f"closed loop: {arrivals.closed_loop.description}. A request is due when its turn has come, so a slow "
            "server is asked less; do not read these latencies as those of an open load"
        )
    elif any(klass.session is not None for klass in scenario.workload.classes):
        loop = "open, closed within a session"
        notes.append(
            "sessions begin as an open load; within one, a turn is due when the answer before it has ended and the "
            "pause is over, so a slow server is asked for later turns later"
        )
    if arrivals.rate_changes:
        notes.append(
            "the rate was meant to change during the run: figures over all of it mix several loads, and its arrivals "
            "look burstier than those of any moment; read them over time"
        )
    if quantised_into_s is not None:
        notes.append(
            f"the times of {arrivals.file} are rounded to bins of {quantised_into_s:g} s; "
            + ("they are spread evenly within them" if arrivals.dequantize
               else "all requests of a bin come at once: arrivals.dequantize: true spreads them")
        )  # fmt: skip
    return {
        "loop": loop, "rate_changes": arrivals.rate_changes, "quantised_into_s": quantised_into_s, "told": notes,
    }  # fmt: skip


def rate_to_come(scenario: Scenario, seed: int) -> str | None:
    """What a replay is about to send, in a sentence: its rate tells whether the times of the trace were understood."""
    arrivals = scenario.arrivals
    if arrivals.process != "trace":
        return None
    offsets_s, rows = arrivals.draw(arrivals_rng(seed))
    path = find_trace(arrivals.file)
    form = form_of(path)
    span_s = float(offsets_s[-1] - offsets_s[0])
    rate = f"{(len(rows) - 1) / span_s:.3g} per second" if span_s > 0 else "all at once"
    unit = f" (its timestamps are {told_unit(clock_and_blocks(path, arrivals.window())[0])})" if form.has_unit else ""
    return f"{path.name}{unit}: {len(rows):,} requests in {span_s:,.3g} s, {rate}"


def workload_facts(scenario: Scenario, seed: int) -> dict[str, Any]:
    """`traces`, `blocks` and `notes` (the same in words), each only where there is something to say."""
    traces = _traces(scenario, seed)
    blocks = _blocks(scenario, traces)
    facts = {"traces": traces, "blocks": blocks, "notes": _notes(traces, blocks)}
    return {name: value for name, value in facts.items() if value}


def repeated_texts(scenario: Scenario) -> list[str]:
    """A warning for several runs on one server: which texts no seed changes."""
    recorded = [klass.klass for klass in scenario.workload.classes if klass.content == "recorded"]
    if not recorded:
        return []
    return [
        f"class {', '.join(recorded)} sends recorded texts, the same ones with every seed: a server that had them in a "
        "run before finds them in its prefix cache; restart it before each run, or serve without a prefix cache"
    ]


def _traces(scenario: Scenario, seed: int) -> dict[str, dict[str, Any]]:
    """Facts by the name that the scenario has for a trace."""
    dealt = {klass.from_file for klass in scenario.workload.classes if klass.from_file}
    whole = {klass.from_file for klass in scenario.workload.classes if klass.session and klass.session.recorded}
    found = {file: read_trace(find_trace(file)) for file in sorted(dealt)}
    if scenario.arrivals.process == "trace":
        found[scenario.arrivals.file] = scenario.arrivals.recorded(arrivals_rng(seed))
    return {
        file: {
            "form": slice_.form.name, "requests": slice_.num_rows, "in_slice": len(slice_.rows),
            "left_out": slice_.left_out,
            # ServeGen names clients, whose requests do not follow each other.
            "in_sessions": (
                0 if slice_.form is SERVEGEN or file in whole else sum(bool(row.session_id) for row in slice_.rows)
            ),
            **(session_facts(slice_.rows) if file in whole else {}),
            "block_tokens": slice_.block_tokens or None, "quantised_into_s": slice_.bins.width_s,
        }
        for file, slice_ in found.items()
    }  # fmt: skip


def _blocks(scenario: Scenario, traces: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By class: tokens of a block in the trace and as sent, and the factor of all prompts."""
    blocks = {}
    for klass in scenario.workload.classes:
        if klass.content != "blocks":
            continue
        recorded = traces[klass.from_file or scenario.arrivals.file]["block_tokens"]
        sent = klass.block_tokens or recorded
        blocks[klass.klass] = {"trace_block_tokens": recorded, "block_tokens": sent, "prompt_scale": sent / recorded}
    return blocks


def _notes(traces: dict[str, dict[str, Any]], blocks: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each fact that a reader of the results must know."""
    lines = []
    for file, trace in traces.items():
        dropped = "".join(f"; left out: {number:,} {reason}" for reason, number in trace["left_out"].items())
        if dropped:
            lines.append(f"{file}: {trace['requests']:,} requests{dropped}")
        if trace["form"] in VLLM_LEAVES_OUT:
            lines.append(f"{file}: all rows are used; vllm bench serve leaves out {VLLM_LEAVES_OUT[trace['form']]}")
        if trace["in_sessions"]:
            lines.append(
                f"{file}: {trace['in_sessions']:,} requests belong to sessions, but each is sent at its own recorded "
                "time, also where the answer before it has not ended yet"
            )
        if "sub_agents" in trace:
            lines.append(
                f"{file}: {trace['sessions']:,} sessions with {trace['sub_agents']:,} sub-agents; {trace['joins']:,} "
                "requests wait for several answers"
            )
    for klass, scale in blocks.items():
        if scale["prompt_scale"] != 1:
            lines.append(
                f"class {klass}: blocks of {scale['trace_block_tokens']} tokens are sent as {scale['block_tokens']}: "
                f"prompts have {scale['prompt_scale']:.4g} of their length in the trace"
            )
    return lines
