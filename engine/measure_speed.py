"""Measures the normal speed of a model on this device: real steps on synthetic prompts, for a few seconds.

`sojourn calibrate device --model` calls `measure`. A run without a reference starts `main` in a process of its own
(loadgen/run/speed.py), so that neither the run's environment nor a fault of its server is in the figure.
"""

import json
import os
import random
import sys
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.engine.process import let_threads_sleep
from sojourn.metrics.compute.speed_reference import SpeedEntry, family_of, fit_entry, line, settings_of
from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.records import StepRecord

SECONDS = 3.0
FEWEST_STEPS = 256  # of a slow model or machine: it gets more time for them
MORE_SECONDS = 30.0
WARM_WAVES = 2  # memory is faulted in, kernels are chosen
BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (6, 12, 40, 130, 300, 700, 1500)  # tokens
WAVE_TOKENS = 3000  # of the prompts of a wave at most: decodes get their share of the time
OUTPUTS = (2, 24)
TEXT_TOKENS = (16, 64, 256, 1024)


def measure(model: str, settings: dict[str, Any], seconds: float = SECONDS) -> tuple[str, SpeedEntry]:
    """An entry of the speed reference, and its family. `settings` are those of EngineConfig that decide the speed.

    Raises what LLM raises, and CalibrationError where too few steps fit into the time.
    """
    let_threads_sleep(os.environ, sys.modules)
    from sojourn.engine.llm import LLM

    records: list[StepRecord] = []
    with LLM(model, on_steps=records.extend, prefix_caching=False, max_num_seqs=max(BATCHES), **settings) as llm:
        dice, end = random.Random(0), time.monotonic() + seconds
        for wave in range(10_000):
            if wave == WARM_WAVES:
                records.clear()
                end = time.monotonic() + seconds
            if wave > WARM_WAVES and _is_enough(len(records), time.monotonic() - end):
                break
            _wave(llm, dice)
        ready, tokenizer = llm.ready, llm._tokenizer
    core = {"threads": ready.threads, "dtype": ready.dtype, "weights": ready.weights}
    in_force = settings_of({"core": core}, EngineConfig(model=model, **settings).model_dump())
    entry = fit_entry(
        ready.shape, records, name="calibration", identity=time.time_ns(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"), settings=in_force,
        **_texts(tokenizer),
    )  # fmt: skip
    if entry is None:
        raise CalibrationError(f"only {len(records)} steps fit into {seconds:g} s, too few; give it more seconds")
    core["device"] = ready.device
    shape = msgspec.to_builtins(ready.shape)
    family = family_of({"model_shape": shape, "core": core, "hardware": hardware(), "versions": versions()})
    return family, entry


def _is_enough(num_steps: int, over_seconds: float) -> bool:
    """`over_seconds`: how long the time to measure has been over."""
    return over_seconds >= MORE_SECONDS or (over_seconds >= 0 and num_steps >= FEWEST_STEPS)


def main() -> None:
    """The process beside a run: its argument is JSON, its last line of output the entry."""
    sys.stdout.buffer.write(msgspec.json.encode(measure(**json.loads(sys.argv[1]))[1]) + b"\n")


def _wave(llm: Any, dice: random.Random) -> None:
    """Requests of several sizes at once."""
    from sojourn.engine.sampling import SamplingParams

    capacity = min(llm.ready.max_model_len, llm.ready.pool_tokens) - OUTPUTS[1]
    length = dice.choice([length for length in PROMPTS if length <= capacity] or [max(1, capacity)])
    batch = min(dice.choice(BATCHES), max(1, WAVE_TOKENS // length))
    vocabulary = range(3, llm._tokenizer.vocab_size)
    prompts = [dice.choices(vocabulary, k=length) for _ in range(batch)]
    sampling = [SamplingParams(max_tokens=dice.randint(*OUTPUTS), temperature=0.8, ignore_eos=True) for _ in prompts]
    llm.generate(prompts, sampling)


def _texts(tokenizer: Any) -> dict[str, Any]:
    """What texts cost: characters → ids, and ids → characters."""
    if not hasattr(tokenizer, "decode"):  # a model without a tokenizer
        return {}
    dice, characters, encoding, tokens, decoding = random.Random(0), [], [], [], []
    for count in TEXT_TOKENS * 4:
        ids = [dice.randrange(3, tokenizer.vocab_size) for _ in range(count)]
        stream, begin = tokenizer.stream(), time.perf_counter_ns()
        text = "".join(stream.push(token) for token in ids)
        middle = time.perf_counter_ns()
        tokenizer.encode(text)
        encoding.append(time.perf_counter_ns() - middle)
        decoding.append(middle - begin)
        characters.append(len(text))
        tokens.append(count)
    as_line = {"encoding": (characters, encoding), "decoding": (tokens, decoding)}
    return {name: line(np.array(units, float), np.array(ns, float)) for name, (units, ns) in as_line.items()}
