"""What the sampler costs a step: its host part before the forward pass, and the draw, by what the requests ask for.

python -m bench.steps.sampling_step
"""

import json
import statistics
import time
from dataclasses import dataclass

import torch

from sojourn.engine.config import model_folder
from sojourn.engine.sampling import Grammar, SamplingParams
from sojourn.engine.techniques.grammar.guides import Guides
from sojourn.engine.token.sampling.sampler import Sampler

ROWS = 64
STEPS = 10
CONTROLS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k and top-p": {"top_k": 50, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2},
    "LZ penalty": {"lz_penalty": 0.2},
    "bias and bad words": {"logit_bias": {5: 1.0}, "bad_words": [[4, 5], [9]]},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}


@dataclass
class Drawer:
    id: str
    sampling: SamplingParams
    token_ids: list[int]
    prompt_tokens: int


def drawers(controls: dict, vocab_size: int) -> list[Drawer]:
    ids = [(7 * i) % min(vocab_size, 900) for i in range(600)]
    return [Drawer(str(i), SamplingParams(max_tokens=1, seed=i, **controls), list(ids), 200) for i in range(ROWS)]


def measure(controls: dict, vocab_size: int) -> tuple[float, float]:
    """Medians in milliseconds for ROWS requests: preparing, drawing."""
    sampler, rows = Sampler(vocab_size, torch.device("cpu")), drawers(controls, vocab_size)
    logits = torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(0))
    preparing, drawing = [], []
    for _ in range(STEPS):
        begin = time.perf_counter()
        inputs = sampler.prepare(rows)
        middle = time.perf_counter()
        ids = sampler.sample(logits, inputs).tolist()
        drawing.append(time.perf_counter() - middle)
        preparing.append(middle - begin)
        for row, token in zip(rows, ids, strict=True):
            row.token_ids.append(token)
    return statistics.median(preparing) * 1e3, statistics.median(drawing) * 1e3


def measure_grammar() -> tuple[float, float, float]:
    """Medians in milliseconds on the bundled model's vocabulary: to compile, and to fill 1 and ROWS masks."""
    folder = model_folder("tiny-model")
    guides = Guides(folder, 2560)
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    rows = drawers({"grammar": grammar, "stop_token_ids": [2]}, 2560)
    guides.begin(rows[0])._done.wait()  # the first waits for the tokenizer
    compiling = []
    for row in rows[1:]:
        begin = time.perf_counter()
        preparation = guides.begin(row)
        preparation._done.wait()
        compiling.append(time.perf_counter() - begin)
    filling = {1: [], ROWS: []}
    for count, times in filling.items():
        for _ in range(STEPS):
            begin = time.perf_counter()
            guides.fill(rows[:count], [()] * count)()
            times.append(time.perf_counter() - begin)
    return tuple(statistics.median(times) * 1e3 for times in (compiling, filling[1], filling[ROWS]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for vocab_size in (2560, 151_936):
        print(f"{ROWS} requests, {vocab_size:,} tokens, 1 thread       prepare    draw")
        for name, controls in CONTROLS.items():
            prepare_ms, draw_ms = measure(controls, vocab_size)
            print(f"  {name:<44} {prepare_ms:7.2f} {draw_ms:8.2f} ms")
    compile_ms, one_ms, all_ms = measure_grammar()
    print(f"a grammar: compiled in {compile_ms:.2f} ms; 1 mask {one_ms:.2f} ms, {ROWS} masks {all_ms:.2f} ms")
