"""An error message or a traceback alone, as people paste it: without the log around it."""

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import Held
from sojourn.interop.held.logs import llama_cpp, sglang, tensorrt_llm, vllm
from sojourn.interop.held.logs.events import events_of, says_fault

LOGS = (vllm, sglang, tensorrt_llm, llama_cpp)
ALONE = "the load, the settings and what came before: this is an error message alone; give the whole log"


def recognises(given: Given) -> bool:
    return not given.documents and says_fault(given.plain) and not any(log.recognises(given) for log in LOGS)


def read(given: Given) -> list[Held]:
    events = events_of(given.lines, lambda line: line.ns)
    return [Held(kind="error message", name=given.name, events=events, missing=[ALONE])]
