"""What the page of metrics costs the front: a record folded in, and a scrape written. python -m bench.steps.exporter"""

import timeit
from collections.abc import Callable
from functools import partial
from random import Random

import msgspec

from sojourn.interop.exported.prometheus import FOLDED_AT_ONCE, Exporter
from sojourn.interop.exported.prometheus_steps import SAMPLES
from sojourn.interop.exported.vllm_names import EngineFacts
from sojourn.metrics.records import RequestRecord, StepRecord
from sojourn.metrics.steps import Steps
from tests.metrics.random_records import MS, random_request, random_step

BATCH = 64  # steps of one fold
ROUNDS = 60  # short ones, of which the fastest counts: others on the machine only add
FACTS = EngineFacts(1000, 16, 8192, 4096, "float32", prefix_caching=True)


def microseconds(times: int, work: Callable[..., object], *arguments: object) -> float:
    return min(timeit.repeat(partial(work, *arguments), number=times, repeat=ROUNDS)) / times * 1e6


def decodes(sequences: int) -> StepRecord:
    return msgspec.structs.replace(
        random_step(Random(1)), kinds=["decode"] * sequences, new_tokens=[1] * sequences, past_tokens=[100] * sequences,
        request_ids=[f"r{index}" for index in range(sequences)], refusals={}, predicted_ns=MS,
        preempted_ids=[], preempted_for=[], preempted_tokens=[], **{field: [] for field in SAMPLES.values()},
    )  # fmt: skip


def fold(exporter: Exporter, records: list[StepRecord]) -> None:
    """Of new Steps, as each fold of a server: used again, they have their columns already."""
    exporter.observe_steps(Steps(records))


def answer(tokens: int) -> RequestRecord:
    token_ns = [index * MS for index in range(tokens)]
    return msgspec.structs.replace(random_request(Random(1)), token_ns=token_ns, finish_reason="stop", error=None)


def main() -> None:
    for compat in ("none", "vllm"):
        exporter = Exporter("bench", [{"klass": "all", "ttft_ms": 100.0}], compat)
        exporter.observe_ready(FACTS)
        print(f"compat={compat}")
        for sequences in (1, 8, 32):
            cost = microseconds(30, fold, exporter, [decodes(sequences)] * BATCH) / BATCH
            print(f"  step of {sequences:2} decodes    {cost:8.2f} µs")
        for tokens in (16, 128, 1024):
            cost = microseconds(FOLDED_AT_ONCE, exporter.observe_request, answer(tokens))  # one fold at least
            print(f"  request of {tokens:4} tokens {cost:8.2f} µs")
        print(f"  scrape of {len(exporter.render()) / 1000:4.0f} kB      {microseconds(1, exporter.render):8.1f} µs")


if __name__ == "__main__":
    main()
