"""What an event in a log says of the cause."""

from collections.abc import Mapping
from typing import NamedTuple

from sojourn.interop.held.held import EventKind
from sojourn.triage.document import State
from sojourn.triage.summary_rules import WATCH

KERNEL_LOG = "dmesg -T | grep -iE 'killed process|oom|segfault|xid'"


class EventRule(NamedTuple):
    """What an event in a log says of the cause."""

    cause: str
    confidence: float  # 0: the event itself is all that is known
    rivals: tuple[str, ...]
    state: State
    next: str


# An event is certain: the log states it. Its cause is likely where the kind of event has one.
EVENTS: Mapping[EventKind, EventRule] = {
    "traceback": EventRule("", 0.0, (), "problem", WATCH),
    "out of memory": EventRule("the memory of the device ran out", 0.9, ("another process took it",), "problem",
                               WATCH),
    "restart": EventRule("", 0.0, (), "problem", WATCH),
    "throttle": EventRule("the device was throttled: its clock was held down", 0.8, ("a limit on power",), "problem",
                          "nvidia-smi -q -d PERFORMANCE"),
    "preemption": EventRule("the KV cache is too small for the requests that run at once", 0.7,
                            ("a few very long requests",), "problem", WATCH),
    "hang": EventRule("an engine hangs: requests run, and no token comes", 0.8, ("one very long prefill",), "stuck",
                      "py-spy dump --pid PID"),
    "compilation": EventRule("", 0.0, (), "no problem seen", WATCH),
    "late compilation": EventRule(
        "kernels or graphs are compiled at first use, while requests wait", 0.6,
        ("one long step of another kind: after a warm-up of each shape it stays",), "problem", WATCH,
    ),
    "death": EventRule("a process of the engine died: requests that it had are lost", 0.7,
                       ("somebody ended it from outside",), "problem", KERNEL_LOG),
    "refused": EventRule("", 0.0, (), "problem", WATCH), "error": EventRule("", 0.0, (), "problem", WATCH),
    "warning": EventRule("", 0.0, (), "no problem seen", WATCH),
}  # fmt: skip
