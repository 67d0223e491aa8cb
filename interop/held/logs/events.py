"""What lines of any server's log say happened: tracebacks with their last line, memory that ran out, deaths, waits."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sojourn.interop.held.given import Line
from sojourn.interop.held.held import Event, EventKind
from sojourn.interop.held.literals import found_in, lines_with

# Whoever writes a line: `(EngineCore pid=104) ERROR 05-05 12:36:59 [core.py:1131] `, `[2026-04-05 20:02:48 TP0] `.
WRITER = re.compile(
    r"(?P<process>\((?:[\w:.\-]+[ _])?[^()]{0,60}?pid=\d+[^()]{0,40}\) ?)?"
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)[: ]+)?"
    r"(?:\d{4}-)?(?:\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? (?:\[[\w./]+:\d+\]|[\w./]+:\d+\]) ?)?"
)
SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?P<rank>[^\]]*)\] ?")
LAST_LINE = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
SHUTDOWN = re.compile(r"shutdown triggered|Received (?:SIGTERM|SIGINT|signal)|INFO: +Shutting down|SIGTERM received")
BEGIN = re.compile(r"Application startup complete|Initializing an? (?:V1 )?LLM engine")
TRACEBACK = "Traceback (most recent call last)"
LONGEST = 240  # characters of a sentence


@dataclass(frozen=True, slots=True)
class Sign:
    """A kind of line. `sentence` may use the groups of the pattern."""

    kind: EventKind
    pattern: re.Pattern[str]
    sentence: str


def _sign(kind: EventKind, pattern: str, sentence: str) -> Sign:
    return Sign(kind, re.compile(pattern), sentence)


SIGNS = (
    _sign("preemption", r"is preempted by PreemptionMode\.(?P<mode>\w+)", "a request was preempted ({mode}): KV full"),
    _sign("preemption", r"KV cache pool is full\. Retract requests|[Dd]ecode out of memory happened",
          "requests were retracted: the KV pool was full"),
    _sign("preemption", r"[Pp]reempting request \S+", "a request was preempted"),
    _sign("out of memory", r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<size>[\d.]+ \w+)",
          "the device had no memory for {size}"),
    _sign("out of memory", r"No available memory for the cache blocks", "no memory was left for the KV cache"),
    _sign("out of memory", r"Not enough memory\. Please try to increase --mem-fraction-static",
          "no memory was left for the KV cache"),
    _sign("out of memory", r"larger than the maximum number of tokens that can be stored in (?:the )?KV cache",
          "the longest context does not fit into the KV cache"),
    _sign("out of memory", r"(?:[Oo]ut of memory: Killed process|oom-kill:|OOMKilled)",
          "the host's memory ran out, and a process was killed"),
    _sign("out of memory", r"failed to (?:allocate|find a memory slot)", "memory could not be allocated"),
    _sign("death", r"Engine core proc(?:ess)? \S+ died unexpectedly|[Ee]ngine core exited unexpectedly|EngineCore died"
          r"|EngineDeadError", "the engine's process died"),
    _sign("death", r"Worker proc \S+ died unexpectedly", "a worker process died"),
    _sign("error", r"EngineCore encountered a fatal error", "the engine met a fatal error"),
    _sign("error", r"NVRM: Xid \([^)]*\): (?P<code>\d+)", "the GPU reported Xid {code}"),
    _sign("death", r"(?:Fatal Python error|Segmentation fault|SIGSEGV)", "a process crashed"),
    _sign("error", r"CUDA error: (?P<what>[\w ]+)", "CUDA error: {what}"),
    _sign("hang", r"No available shared memory broadcast block found in (?P<s>\d+) second",
          "a worker took nothing from the engine for {s} s"),
    _sign("hang", r"[Ww]atchdog (?:caught collective operation )?timeout", "a watchdog's time ran out"),
    _sign("hang", r"Health check failed\. Server couldn't get a response", "a health check got no answer"),
    _sign("late compilation", r"JIT compilation during inference: (?P<kernel>\w+)",
          "kernel {kernel} was compiled while requests ran"),
    _sign("compilation", r"Compiling a graph for .* takes (?P<s>[\d.]+) s", "a graph was compiled in {s} s"),
    _sign("compilation", r"Graph capturing finished in (?P<s>[\d.]+) secs?", "graphs were captured in {s} s"),
    _sign("compilation", r"Capture cuda graph end\. Time elapsed: (?P<s>[\d.]+) s", "graphs were captured in {s} s"),
    _sign("compilation", r"torch\.compile (?:takes|took) (?P<s>[\d.]+) s", "torch.compile took {s} s"),
    _sign("compilation", r"init engine \(profile, create kv cache, warmup model\) took (?P<s>[\d.]+) s",
          "profiling, KV cache and warmup took {s} s of the engine's start"),
    _sign("warning", r"Time spent downloading weights for (?P<m>\S+): (?P<s>[\d.]+) seconds",
          "weights were downloaded for {s} s"),
    _sign("warning", r"forcing full prompt re-processing due to lack of cache data",
          "a whole prompt was computed again: the cache could not be used"),
    _sign("warning", r"context shift|slot context shift", "a context was shifted"),
    _sign("refused", r'HTTP/1\.[01]" (?P<code>429|503)\b', "requests were refused: HTTP {code}"),
    _sign("error", r'"POST [^"]*" (?P<code>5(?!03)\d\d)\b', "requests ended with HTTP {code}"),
)  # fmt: skip
CUMULATIVE = re.compile(r"total_num_cumulative_preemption=(\d+)")  # engine V0 writes one line of fifty
# What a fault is, whoever writes it.
FAULTS = ("out of memory", "error", "hang", "death")


def events_of(lines: Sequence[Line], moment: Callable[[Line], int | None]) -> list[Event]:
    """In order of their first lines; lines that say the same are one event."""
    text = "\n".join(line.text for line in lines)
    signs = [sign for sign in SIGNS if found_in(sign.pattern, text)]
    found: dict[tuple[str, str], list[tuple[int, int | None]]] = {}
    counted: dict[tuple[str, str], int] = {}
    for line in lines_with(lines, [sign.pattern for sign in signs], text):
        for sign in signs:
            if (match := sign.pattern.search(line.text)) is not None:
                key = (sign.kind, sign.sentence.format(**match.groupdict()))
                found.setdefault(key, []).append((line.number, moment(line)))
                if (count := CUMULATIVE.search(line.text)) is not None:
                    counted[key] = max(counted.get(key, 0), int(count[1]))
                break
    events = [
        Event(kind=kind, sentence=sentence, line=seen[0][0], ns=seen[0][1],
              times=max(len(seen), counted.get((kind, sentence), 0)))
        for (kind, sentence), seen in found.items()
    ]  # fmt: skip
    ends = [line.number for line in lines_with(lines, [SHUTDOWN], text) if SHUTDOWN.search(line.text)]
    begins = [line.number for line in lines if BEGIN.search(line.text)] if ends else []
    events += tracebacks_of(lines, moment) if TRACEBACK in text else []
    return [_of_shutdown(event, ends, begins) for event in sorted(events, key=lambda event: event.line)]


def while_serving(events: list[Event], served: Sequence[int], starts: Sequence[int]) -> list[Event]:
    """The same; a compilation behind a line of load of the same process is one that requests waited for. `served` and
    `starts`: the lines that show load, and those at which a process began."""
    found = []
    for event in events:
        begun = max((line for line in starts if line <= event.line), default=0)
        if event.kind == "compilation" and any(begun < line < event.line for line in served):
            event = msgspec.structs.replace(event, kind="late compilation",
                                            sentence=f"{event.sentence}, while requests ran")  # fmt: skip
        found.append(event)
    return found


def says_fault(text: str) -> bool:
    """Whether a text names a fault of a server: a traceback, or a line of such a kind."""
    return TRACEBACK in text or any(found_in(sign.pattern, text) for sign in SIGNS if sign.kind in FAULTS)


def _of_shutdown(event: Event, ends: list[int], begins: list[int]) -> Event:
    """What dies because somebody stopped the server is no fault."""
    end = max((line for line in ends if line < event.line), default=None)
    if (
        event.kind not in ("error", "traceback", "death")
        or end is None
        or any(end < line < event.line for line in begins)
    ):
        return event
    return msgspec.structs.replace(event, kind="warning", sentence=f"after a shutdown: {event.sentence}")


def tracebacks_of(lines: Sequence[Line], moment: Callable[[Line], int | None]) -> list[Event]:
    """Each with its last line; one that was cut off without."""
    open_ones: dict[str, Line] = {}
    found: dict[str, list[tuple[int, int | None]]] = {}

    def end(process: str, text: str) -> None:
        begun = open_ones.pop(process)
        found.setdefault(text, []).append((begun.number, moment(begun)))

    for line in lines:
        if not open_ones and TRACEBACK not in line.text:
            continue
        process, rest = writer_of(line.text)
        if rest.lstrip().startswith(TRACEBACK):
            open_ones.setdefault(process, line)
        elif process in open_ones and rest[:1] not in ("", " ", "\t", "|"):
            if (last := LAST_LINE.match(rest.strip())) is not None and _is_exception(last["name"], last["text"]):
                end(process, f"{last['name'].rpartition('.')[2]}: {last['text'] or ''}".removesuffix(": "))
            elif not rest.startswith(("The above exception", "During handling")):
                end(process, "")
    for process in list(open_ones):
        end(process, "")
    return [
        Event(kind="traceback", sentence=_cut(text) or "a traceback without its last line", line=seen[0][0],
              ns=seen[0][1], times=len(seen))
        for text, seen in found.items()
    ]  # fmt: skip


def writer_of(text: str) -> tuple[str, str]:
    """Which process wrote a line, "" where it does not say, and what it wrote."""
    if (found := SGLANG.match(text)) is not None:
        return found["rank"].strip(), text[found.end() :]
    found = WRITER.match(text)
    return (found["process"] or "").strip(), text[found.end() :]


def _is_exception(name: str, text: str | None) -> bool:
    last = name.rpartition(".")[2]
    return last.endswith(("Error", "Exception", "Interrupt", "Exit", "Timeout", "Warning", "Group")) or (
        "." in name and text is not None and last[:1].isupper()
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
