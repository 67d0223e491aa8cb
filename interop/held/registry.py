"""Every reader, in one place, and what a file, a page or a pasted text is.

A new kind is a module with a `Reader`, and an entry here. The first reader that recognises what was given reads it.
"""

import re
from pathlib import Path

import msgspec

from sojourn.interop.held.given import LARGEST, Given
from sojourn.interop.held.held import Held, Reader
from sojourn.interop.held.logs.readers import LOG_READERS
from sojourn.interop.held.summaries.readers import SUMMARY_READERS
from sojourn.interop.imported.foreign import kind_of
from sojourn.metrics.errors import InputError

# A summary is recognised by its fields; a log by some of its lines, so it comes last.
READERS: tuple[Reader, ...] = (*SUMMARY_READERS, *LOG_READERS)
WANTED = "give a log, a page of /metrics, or a result of a benchmark as its tool writes it"
TOOLS = "vllm bench, SGLang's bench_serving, GuideLLM, AIPerf, inference-perf, llmperf, k6, Locust, oha, Ollama"
TRACE = re.compile(r"(?i)(?=[^\n]*tokens)\"?(?:timestamp|arrived_at|arrival)[\w ]*\"?,")  # the head of its CSV
DAMAGED = (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError)


def read_file(path: Path) -> list[Held]:
    """Raises InputError where it cannot be read, or is of no known kind."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; name the files in it")
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path} is larger than 1 GiB; give its last part: tail -n 200000 {path.name}")
        return read_held(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def read_held(content: bytes | str, name: str) -> list[Held]:
    """What was given, as evidence. Raises InputError with a sentence for what no reader knows, or is damaged."""
    given = Given(content, name)
    if not given.text.strip():
        raise InputError(f"{name} {given.problem or 'is empty'}")
    readers = readers_of(given)
    if not readers:
        raise InputError(f"{name} {_unknown(given)}")
    found = [each for reader in readers for each in _read(reader, given)]
    if given.problem:
        found = [_with_note(each, f"the file {given.problem}") for each in found]
    return found


def readers_of(given: Given) -> list[Reader]:
    """Those that recognise it: several where each of them reads a part of a text."""
    found = []
    for reader in READERS:
        if reader.recognises(given):
            found.append(reader)
            if not reader.shares_text:
                break
    return found


def _read(reader: Reader, given: Given) -> list[Held]:
    try:
        return reader.read(given)
    except InputError as error:
        raise InputError(f"{given.name}: {error}") from None
    except DAMAGED as error:
        why = f"looks like {reader.kind}, and has not its form ({error!r}); is it cut off?"
        raise InputError(f"{given.name} {why}") from None


def _with_note(held: Held, note: str) -> Held:
    return msgspec.structs.replace(held, notes=[*held.notes, note])


def _unknown(given: Given) -> str:
    if given.documents:
        kind = kind_of(given.documents[0])
        keys = list(given.documents[0])[:6] if isinstance(given.documents[0], dict) else []
        return (
            "; ".join(kind)
            if kind
            else f"is JSON of no known tool (its keys: {', '.join(map(str, keys))}); {WANTED}: {TOOLS}"
        )
    first = next((line.text.strip() for line in given.lines if line.text.strip()), "")
    if TRACE.match(first):
        return "is a trace of requests, a load and no result: name it in a scenario (arrivals: process: trace)"
    if first.startswith("<"):
        return f"is a page in HTML or XML, which holds figures to look at; {WANTED}"
    return f"has no line of a known kind (it begins with {first[:40]!r}); {WANTED}"
