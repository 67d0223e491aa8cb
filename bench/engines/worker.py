"""One engine in a process of its own. The benchmark starts it and sends orders to its standard input.

Each line in is a JSON object, each line out is its answer: {"model", "settings"} once, then any number of
{"prompts", "output_lens", "temperature"}.
"""

import json
import os
import sys
import time

from bench.report.breakdown import steps_of_records
from sojourn.engine import LLM, SamplingParams
from sojourn.metrics.records import StepRecord

FACTS = ("device", "dtype", "threads", "num_kv_blocks", "weights", "weight_bytes")  # of messages.Ready


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    order = json.loads(sys.stdin.readline())
    records: list[StepRecord] = []
    on_steps = records.extend if order["settings"].get("telemetry") != "off" else None
    with LLM(order["model"], on_steps=on_steps, **order["settings"]) as llm:
        ready = llm.ready
        facts = {name: getattr(ready, name) for name in FACTS}
        answers.write(json.dumps(facts | {"vocab_size": ready.shape.vocab_size}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(run(llm, records, json.loads(line))) + "\n")


def run(llm: LLM, records: list[StepRecord], order: dict) -> dict:
    """Generates all prompts at once. The answer says when that began and ended, and has its steps."""
    controls = [
        SamplingParams(max_tokens=length, temperature=order["temperature"], ignore_eos=True, seed=index)
        for index, length in enumerate(order["output_lens"])
    ]
    records.clear()
    begin_ns = time.monotonic_ns()
    outputs = llm.generate(order["prompts"], controls)
    end_ns = time.monotonic_ns()
    errors = [output.error for output in outputs if output.error]
    llm.generate([order["prompts"][0][:1]], SamplingParams(max_tokens=1))  # a step's record comes with the next one's
    # The last step of an earlier call may still be publishing: it began before.
    during = [record for record in records if begin_ns <= record.begin_ns < end_ns]
    columns = {name: values.tolist() for name, values in steps_of_records(during).columns.items()}
    return {
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "output_tokens": sum(len(output.token_ids) for output in outputs),
        "errors": errors[:3],
        "steps": columns if during else None,
    }


if __name__ == "__main__":
    main()
