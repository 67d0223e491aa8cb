"""The steps of a foreign engine as our step records: when each was planned and computed, and what it was made of.

A plan that is made while the step before it is computed makes steps overlap. The device's time of a step then begins
when the step before it is done. An executor may compute within the call that launches a step; the step is done when
that call returns.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sojourn.interop.probe.records import Step
from sojourn.interop.probe.stream import Stream
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.step_costs import StepCosts
from sojourn.metrics.records import StepRecord
from sojourn.metrics.records.step import Costs
from sojourn.metrics.steps import Steps

BATCH = 4096  # steps whose costs are worked out at once


@dataclass(slots=True)
class Choice:
    """A request of the engine: one choice of one prompt of a call."""

    handle: int
    name: str  # in step records
    internal: str
    queued_ns: int
    prompt_tokens: int
    adapter: str | None
    entries: list[tuple[int, int]]  # (place in the steps, place in the step's lists)
    taken: list[int]  # places of the steps whose plan took its blocks
    admitted: list[int]  # places of the steps whose plan gave it a place
    cached_tokens: int = 0
    computed_until: int = 0  # positions, counted once
    recomputed_tokens: int = 0
    ended_ns: int | None = None
    reason: str = ""


def sequences_of(stream: Stream, steps: Sequence[Step], names: dict[int, str]) -> dict[int, Choice]:
    """The engine's requests by their handles. `names` of the handles, as step records have them."""
    found = {
        each.handle: Choice(
            each.handle, names[each.handle], each.request, each.queued_ns, each.prompt_tokens, each.adapter, [], [], []
        )
        for each in stream.arrived
    }
    for at, step in enumerate(steps):
        for place, handle in enumerate(step.handles):
            if handle in found:
                found[handle].entries.append((at, place))
        for handle, hit in zip(step.admitted, step.hits, strict=True):
            if handle in found:
                if not found[handle].admitted:
                    found[handle].cached_tokens = hit
                found[handle].admitted.append(at)
        for handle in step.preempted:
            if handle in found:
                found[handle].taken.append(at)
    for each in stream.ended:
        if each.handle in found:
            found[each.handle].ended_ns, found[each.handle].reason = each.ended_ns, each.reason
    return found


def device_ends(steps: Sequence[Step]) -> list[int]:
    """When the device was done with each step, ns."""
    overlapping = [at for at in range(len(steps) - 1) if steps[at + 1].begin_ns < steps[at].ready_ns]
    launching = sum(_launch_ns(steps[at]) for at in overlapping)
    waiting = sum(steps[at].ready_ns - (steps[at + 1].launched_ns or steps[at + 1].planned_ns) for at in overlapping)
    computes_in_launch = bool(overlapping) and launching > waiting
    ends, last = [], 0
    for step in steps:
        end = step.next_ns if computes_in_launch and step.next_ns else step.ready_ns
        last = max(last, min(end, step.end_ns))
        ends.append(last)
    return ends


def _launch_ns(step: Step) -> int:
    return (step.launched_ns or step.planned_ns) - step.planned_ns


def step_records(
    steps: Sequence[Step], first: int, sequences: dict[int, Choice], shape: ModelShape | None
) -> list[StepRecord]:
    """Our records of them, numbered from `first`."""
    ends = device_ends(steps)
    begins = _turn_begins(steps, sequences)
    kinds = _kinds(steps, sequences)
    planned = [step.begin_ns for step in steps]
    records = []
    for at, step in enumerate(steps):
        device_begin = max(step.planned_ns, ends[at - 1] if at else 0)
        idle = device_begin - ends[at - 1] if at and begins[at] == steps[at - 1].end_ns else 0
        records.append(
            StepRecord.of(
                step=first + at,
                begin_ns=begins[at],
                end_ns=step.end_ns,
                stages=_stages(steps, at, begins[at], planned),
                device_ns=max(ends[at] - device_begin, 0),
                request_ids=[sequences[each].name if each in sequences else f"#{each}" for each in step.handles],
                new_tokens=step.new,
                past_tokens=step.past,
                kinds=kinds[at],
                padding_tokens=0,
                graph="eager",
                budget=step.budget,
                waiting=step.waiting,
                refusals=_refusals(step),
                preempted_ids=[sequences[each].name for each in step.preempted if each in sequences],
                preempted_for=[
                    sequences[taker].name if taker in sequences else ""
                    for each, taker in zip(step.preempted, step.preempted_for, strict=True)
                    if each in sequences
                ],
                preempted_tokens=[
                    tokens
                    for each, tokens in zip(step.preempted, step.preempted_tokens, strict=True)
                    if each in sequences
                ],
                evicted_blocks=0,
                **_blocks(step),
                gap_ns=max(idle, 0),
                emitted_tokens=sum(step.given),
                planned_ns=step.planned_ns,
                device_end_ns=ends[at],
                logit_rows=sum(1 for given in step.given if given),
                drafted_tokens=step.drafted,
            )
        )
    _with_costs(records, shape)
    return records


def _with_costs(records: list[StepRecord], shape: ModelShape | None) -> None:
    """FLOPs, bytes and the expected time. Without a shape a step's FLOPs stand for its tokens."""
    if shape is None:
        for record in records:
            record.costs = Costs(flops=sum(record.new_tokens))
        return
    costs = StepCosts(shape)
    for begin in range(0, len(records), BATCH):
        costs.complete(Steps(records[begin : begin + BATCH]))


def _turn_begins(steps: Sequence[Step], sequences: dict[int, Choice]) -> list[int]:
    """A turn begins where the one before it ended, or, if no request was in the engine then, with the plan."""
    came = np.sort(np.array([each.queued_ns for each in sequences.values()], np.int64))
    left = np.sort(np.array([each.ended_ns for each in sequences.values() if each.ended_ns is not None], np.int64))
    begins = []
    for at, step in enumerate(steps):
        before = steps[at - 1].end_ns if at else step.begin_ns
        alive = np.searchsorted(came, before, side="right") > np.searchsorted(left, before + 1_000_000, side="right")
        begins.append(before if at and (alive or step.begin_ns < before) else step.begin_ns)
    return begins


def _stages(steps: Sequence[Step], at: int, begin_ns: int, planned: Sequence[int]) -> list[int]:
    """Nanoseconds of STAGES. Plans that were made in this turn, also those of later steps, are its `schedule`."""
    step = steps[at]
    low = bisect.bisect_left(planned, begin_ns)
    made = []
    while low < len(steps) and steps[low].begin_ns < step.ready_ns:
        made.append(steps[low])
        low += 1
    receive = made[0].begin_ns - begin_ns if made else 0
    schedule = sum(each.planned_ns - each.begin_ns for each in made)
    wait = step.ready_ns - begin_ns - receive - schedule
    return [receive, schedule, 0, 0, wait, 0, step.end_ns - step.ready_ns, 0]


def _kinds(steps: Sequence[Step], sequences: dict[int, Choice]) -> list[list[str]]:
    """Of each entry of each step. Adds to the choices what they computed."""
    found = []
    for step in steps:
        kinds = []
        for handle, new, past, given in zip(step.handles, step.new, step.past, step.given, strict=True):
            choice = sequences.get(handle)
            if choice is None:  # it came before the record began
                kinds.append("decode" if new == 1 else "prefill")
                continue
            again = max(min(past + new, choice.computed_until) - past, 0)
            if again:
                kinds.append("recompute")
            elif past < choice.prompt_tokens:
                kinds.append("prefill")
            else:
                kinds.append("verify" if new > 1 else "decode")
            choice.recomputed_tokens += again
            computed = past + (max(given, 1) if kinds[-1] == "verify" else new)
            choice.computed_until = max(choice.computed_until, computed)
        found.append(kinds)
    return found


def _refusals(step: Step) -> dict[str, int]:
    if not step.waiting or not step.refused:
        return {}
    return {step.refused: 1} | ({"behind_head": step.waiting - 1} if step.waiting > 1 else {})


def _blocks(step: Step) -> dict[str, int]:
    """vLLM counts what no request holds, and what has a known prefix. What is both is at least their sum less the
    pool."""
    active = step.blocks - step.free
    reusable = min(max(step.cached - active, 0), step.free)
    return {
        "blocks_free": step.free - reusable, "blocks_active": active, "blocks_reusable": reusable,
    }  # fmt: skip
