"""Three times the calls that the server can serve: quick refusals, and a loop that is not late."""

import argparse

import numpy as np

from bench.torture.client import Answers, Call, Loop, calling
from bench.torture.promises import Outcome, main
from bench.torture.server import Server, serving

MAX_NUM_SEQS, MAX_WAITING, OUTPUT_TOKENS = 8, 16, 100


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Measures the capacity with callers that wait, then sends 0.9 and 3 times as many calls a second, evenly."""
    seconds = 5 if arguments.short else 30
    with serving("--max-num-seqs", str(MAX_NUM_SEQS), "--max-waiting", str(MAX_WAITING)) as server:
        with calling(server.url, loops=[Loop(_call(), MAX_NUM_SEQS, seconds)]) as client:
            capacity = len(_served(client.wait())) / seconds
        below, above = (_offered(server, share * capacity, seconds) for share in (0.9, 3.0))
    refused = [answer for answer in above.answers if answer.status == 429]
    outcome.check("calls beyond the queue are refused", bool(refused), f"{len(refused)} at {3 * capacity:.0f} a second")
    told = sum(answer.retry_after is not None for answer in refused)
    outcome.check("each 429 says when to come again", told == len(refused), f"{told} of {len(refused)}")
    latencies = [answer.latency_ms for answer in refused]
    p99 = float(np.percentile(latencies, 99)) if latencies else None
    outcome.below("a refusal is there, p99", p99, 50, "ms", f"p50 {_median(latencies):.1f} ms; {above.lag}")
    ended = sum(answer.end == "done" for answer in above.answers)
    outcome.check("every call has an end", ended == len(above.answers), f"{ended} of {len(above.answers)}")
    before, after = (_median([float(np.mean(a.gaps_ms)) for a in _served(found)]) for found in (below, above))
    note = f"{before:.2f} ms below the capacity, {after:.2f} ms above it"
    outcome.below(
        "streams at three times the capacity, median of the calls' mean ITL over that below it",
        after / before,
        3,
        "",
        note,
    )


def _call(at_s: float = 0.0) -> Call:
    body = {"model": "tiny-model", "prompt": "The function", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return Call(body | {"stream": True}, at_s)


def _offered(server: Server, per_second: float, seconds: float) -> Answers:
    calls = [_call(index / per_second) for index in range(int(per_second * seconds))]
    with calling(server.url, calls) as client:
        return client.wait()


def _served(found: Answers) -> list:
    return [answer for answer in found.answers if answer.status == 200 and answer.end == "done"]


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else float("nan")


if __name__ == "__main__":
    main("overload", run)
