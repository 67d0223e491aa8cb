"""Decoding that slows down with the uptime is named; neither a larger batch nor longer contexts are taken for it."""

import random

import pytest

from sojourn.interop.held.registry import read_held
from sojourn.triage.decay import decay_of

LINE = (
    "INFO 05-01 {h:02d}:{m:02d}:{s:02d} [loggers.py:257] Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg "
    "generation throughput: {tokens:.1f} tokens/s, Running: {run} reqs, Waiting: 0 reqs, GPU KV cache usage: "
    "{kv:.1f}%, Prefix cache hit rate: 0.0%"
)


def log(minutes: int, speed, batch=lambda part: 8, kv=lambda part: 2.0, seed: int = 1) -> str:
    """`speed`: tokens/s of a request, `kv`: percent of a request, each by the part of the time that has passed."""
    chance, lines = random.Random(seed), []
    for second in range(0, 60 * minutes, 10):
        part = second / (60 * minutes)
        run = max(1, batch(part) + chance.randint(-2, 2))
        lines.append(LINE.format(
            h=second // 3600, m=second // 60 % 60, s=second % 60, run=run, prompt=100.0, kv=min(99.0, run * kv(part)),
            tokens=run * speed(part) * (8 / run) ** 0.3 * chance.uniform(0.9, 1.1),
        ))  # fmt: skip
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        (log(60, lambda part: 30 * (1 - 0.4 * part)), True),
        (log(60, lambda part: 30 if part < 0.5 else 20), True),
        (log(60, lambda part: 30), False),
        (log(60, lambda part: 30 * (1 - 0.1 * part)), False),
        (log(60, lambda part: 30, batch=lambda part: int(4 + 24 * part)), False),
        (log(60, lambda part: 30 * (1 - 0.4 * part), kv=lambda part: 2 + 2 * part), False),
        (log(60, lambda part: 30 if part < 0.3 or part > 0.6 else 15), False),
        (log(5, lambda part: 30 * (1 - 0.4 * part)), False),
    ],
)
def test_decay_is_named_at_the_same_batch_and_contexts_only(text, is_named):
    found = decay_of(read_held(text, "log"), "log")
    assert (found is not None) == is_named, found
    assert found is None or (found.rivals and found.change)
