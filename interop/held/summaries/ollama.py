"""What Ollama says of its answers: the last document of `/api/generate` and `/api/chat`, and `ollama run --verbose`.

Ollama has no /metrics. All of its durations are of one request, in its own clock: loading the model, the prompt, the
answer. `prompt_eval_count` leaves out what its cache had, and is missing where that was the whole prompt. Its endpoint
in OpenAI's form states none of these.
"""

import re
from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.summaries.figures import NO_PROOF, figures_of, milliseconds, prove, told_of
from sojourn.interop.imported.result import Json, inner, number
from sojourn.metrics.errors import InputError

TOOL = "Ollama"
NS = 1e-6  # of its JSON, in ms
CLOCKS = {
    "e2e_ms": "Ollama: its receipt of the request to its end (total_duration)",
    "load_ms": "Ollama: until the model was in memory (load_duration)",
    "prefill_ms": "Ollama: computing what of the prompt was not in the cache (prompt_eval_duration)",
    "decode_ms": "Ollama: generating the answer (eval_duration)",
    "tpot_ms": "Ollama: eval_duration by eval_count",
    "output_tokens": "Ollama: eval_count", "input_tokens": "Ollama: prompt_eval_count, without what its cache had",
}  # fmt: skip
DURATIONS = {"total": "e2e_ms", "load": "load_ms", "prompt eval": "prefill_ms", "eval": "decode_ms"}
COUNTS = {"prompt eval": "input_tokens", "eval": "output_tokens"}
PRINTED = re.compile(
    r"[-\s]*(?P<what>total|load|prompt eval|eval) (?P<kind>duration|count|rate): +"
    r"(?P<value>[\d.]+(?=\s)|[\dhms.µμnu]+)(?: (?:token\(s\)|tokens/s))?(?=\s|$)"
)
RATE = re.compile(r"^[-\s]*(?:prompt )?eval rate: +[\d.]+ tokens/s", re.MULTILINE)
LOADED_MS = 1000.0  # so long takes no model that is in memory already
NOT_SHOWN = ["the load: how many requests came at once, and how long they waited for a slot",
             "a time to first token: total_duration is the whole answer"]  # fmt: skip


def _documents(given: Given) -> list[Json]:
    found = [each for whole in given.documents for each in (whole if isinstance(whole, list) else [whole])]
    return [each for each in found if isinstance(each, dict) and _is_answer(each)]


def _is_answer(document: Any) -> bool:
    return number(inner(document, "total_duration")) is not None and "eval_count" in document


def read_json(given: Given) -> list[Held]:
    answers = []
    for each in _documents(given):
        stated = {ours: number(each.get(f"{theirs.replace(' ', '_')}_duration")) for theirs, ours in DURATIONS.items()}
        answer = {name: NS * value for name, value in stated.items() if value is not None}
        tokens = {ours: number(each.get(f"{theirs.replace(' ', '_')}_count")) for theirs, ours in COUNTS.items()}
        answers.append(answer | {name: value for name, value in tokens.items() if value is not None})
    models = {str(each["model"]) for each in _documents(given) if each.get("model")}
    return [_held(given.name, answers, models)]


def read_printed(given: Given) -> list[Held]:
    answers: list[dict[str, float]] = []
    seen: set[tuple[str, str]] = set()  # of the answer under way
    for line in given.lines:
        if (found := PRINTED.fullmatch(line.text.rstrip())) is None:
            continue
        if not answers or (found["what"], found["kind"]) in seen:
            answers.append({})
            seen = set()
        seen.add((found["what"], found["kind"]))
        names = {"duration": DURATIONS, "count": COUNTS}.get(found["kind"], {})
        value = milliseconds(found["value"]) if found["kind"] == "duration" else number(found["value"])
        if found["what"] in names and value is not None:
            answers[-1][names[found["what"]]] = value
        elif found["kind"] == "rate" and found["what"] == "eval" and value:
            answers[-1]["tpot_ms"] = 1e3 / value
    return [_held(given.name, answers, set())]


def _held(name: str, answers: list[dict[str, float]], models: set[str]) -> Held:
    for each in answers:
        if each.get("output_tokens") and each.get("decode_ms"):
            each["tpot_ms"] = each["decode_ms"] / each["output_tokens"]
    names = {key for each in answers for key in each}
    columns = {key: [each[key] for each in answers if key in each] for key in sorted(names)}
    told: Any = told_of(columns, "answers")
    if not told:
        raise InputError("has no duration of Ollama that can be read")
    told["succeeded", "total"] = len(answers), 1.0, "answers"
    figures = BenchmarkFigures(tool=TOOL, figures=figures_of(CLOCKS, told, "Ollama"))
    slow = [ms for ms in columns.get("load_ms", []) if ms >= LOADED_MS]
    notes = []
    if slow:
        notes.append(
            f"{len(slow)} of {len(answers)} answers waited for the model to be loaded, up to {max(slow) / 1e3:,.1f} s: "
            "keep_alive holds it in memory"
        )
    if len(models) > 1:
        notes.append(f"answers of {len(models)} models are together: {', '.join(sorted(models))[:80]}")
    return Held(
        kind="timings of Ollama", name=name, server="ollama", figures=figures, missing=NOT_SHOWN,
        settings={"model": next(iter(models))} if len(models) == 1 else {},
        notes=[*notes, *(note for note in prove(figures) if note != NO_PROOF)],
    )  # fmt: skip


JSON = Reader(
    kind="answers of Ollama (JSON)", shows="load, prompt and decode time of each answer; no load and no queue",
    recognises=lambda given: bool(_documents(given)), read=read_json,
)  # fmt: skip
PRINTED_READER = Reader(
    kind="what `ollama run --verbose` prints", shows="as the JSON", read=read_printed, shares_text=True,
    recognises=lambda given: found_in(RATE, given.plain),
)  # fmt: skip
