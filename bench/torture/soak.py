"""Half an hour of everything at once: well-behaved clients alone and beside abuse, in turns.

The abuse: clients that leave, readers that stall, bodies that are refused, a tenant above the limits of its tier.
Memory, descriptors and threads must level off, and the abuse must not delay the others.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

from bench.torture.client import Answers, Call, Loop, call_all, completion, percentile
from bench.torture.memory import MIB, Reading, growth_of_second_half, read
from bench.torture.promises import Outcome, main
from bench.torture.run_files import check_server_run
from bench.torture.server import Server, serving, temporary_folder

RATIO = 1.1  # p99 of the gaps of well-behaved streams, beside the abuse to alone
GROWTH_MIB = 16  # of a process over the second half
GROWTH_FDS, GROWTH_THREADS = 4, 2  # likewise
SEND_SECONDS = 5  # after which a reader that stalls is disconnected
KV_BLOCKS = 1024
SETTLE_SECONDS = 1.0  # between two phases: calls of the last one end
ACCESS = """\
default_tier: free
tiers:
  paid: {}
  free: {requests_per_second: 2, concurrency: 2}
tenants: {well: paid, abuse: paid, greedy: free}
"""


def tenant(name: str) -> dict[str, str]:
    return {"x-sojourn-tenant": name}


def well_behaved(seconds: float) -> Loop:
    body = completion(96, prompt_tokens=24)
    return Loop(Call(body, group="well", headers=tenant("well"), timeout_s=60), 4, seconds)


def abuse(seconds: float) -> list[Loop]:
    """Limited in number, as the rest of the machine is: what is measured is isolation, not capacity."""

    def loop(group: str, width: int, pause_s: float, body: dict | str, **call) -> Loop:
        headers = tenant("greedy" if group == "greedy" else "abuse")
        return Loop(Call(body, group=group, headers=headers, timeout_s=20, **call), width, seconds, pause_s)

    return [
        loop("greedy", 8, 0.5, completion(16, seed=1)),
        loop("leaves", 1, 0.5, completion(300, seed=2), leave_after=3),
        loop("leaves whole", 1, 0.7, completion(300, seed=3, stream=False, ignore_eos=False), leave_after=1),
        loop("stalls", 1, 3.0, completion(200, seed=4, logprobs=20), stall_after=2, receive_buffer=1),
        loop("bad", 2, 0.3, '{"model": "tiny-model", "prompt": ' + "[" * 2000),
        loop("bad", 1, 0.3, {"model": "tiny-model", "prompt": "x", "max_tokens": -1, "stop": ["y"] * 400}),
        loop("large", 1, 1.5, '{"model": "tiny-model", "prompt": "x", "' + "z" * 200_000 + '": 1}'),
    ]


def gaps(answers: Answers) -> list[float]:
    return [gap for answer in answers.of("well") for gap in answer.gaps_ms]


class Soak:
    """The phases so far. Only figures stay of each, so that hours cost no memory."""

    def __init__(self, server: Server, phase_seconds: float):
        self.server = server
        self.phase_seconds = phase_seconds
        self.ratios: list[float] = []
        self.p99s: list[tuple[float, float]] = []  # alone, beside
        self.readings: list[Reading] = []
        self.failed_well: list[str] = []
        self.num_calls = self.num_limited = self.num_greedy = 0
        self.worst_lag_ms = 0.0
        self.unended: list[str] = []

    def cycle(self, number: int) -> None:
        """Alone and beside, in an order that changes, so that a drift of the machine cancels."""
        found = {}
        for name in ("alone", "beside") if number % 2 else ("beside", "alone"):
            loops = [well_behaved(self.phase_seconds), *(abuse(self.phase_seconds) if name == "beside" else ())]
            found[name] = call_all(self.server.url, loops=loops, seconds=self.phase_seconds + 60)
            self._count(found[name])
            time.sleep(SETTLE_SECONDS)
            if name == "alone" and (reading := read(self.server)) is not None:
                self.readings.append(reading)
        alone, beside = (percentile(gaps(found[name]), 99) for name in ("alone", "beside"))
        if alone and beside:
            self.p99s.append((alone, beside))
            self.ratios.append(beside / alone)

    def _count(self, answers: Answers) -> None:
        self.num_calls += len(answers.answers)
        self.num_greedy += len(answers.of("greedy"))
        self.num_limited += sum(answer.status == 429 for answer in answers.of("greedy"))
        self.failed_well += [f"{answer.end} {answer.status}" for answer in answers.of("well") if answer.end != "done"]
        self.worst_lag_ms = max(self.worst_lag_ms, answers.lag_p99_ms)
        ours = ("stalls", "leaves whole")  # their clients end them
        self.unended += [answer.group for answer in answers.ended("timeout") if answer.group not in ours]


def judge(outcome: Outcome, soak: Soak) -> None:
    outcome.check("well-behaved clients: every call is answered", not soak.failed_well,
                  f"{len(soak.failed_well)} failed {soak.failed_well[:3] or ''}")  # fmt: skip
    outcome.check("no call without an end", not soak.unended, f"{len(soak.unended)} of {soak.num_calls:,}")
    share = soak.num_limited / max(1, soak.num_greedy)
    outcome.check("the greedy tenant is limited", share > 0.3, f"{share:.0%} of {soak.num_greedy:,} calls got 429")
    ratio = statistics.median(soak.ratios) if soak.ratios else None
    alone, beside = (statistics.median(side) for side in zip(*soak.p99s, strict=True)) if soak.p99s else (0, 0)
    outcome.below("p99 gap of well-behaved streams, beside abuse", ratio, RATIO, "times that alone",
                  f"median of {len(soak.ratios)} pairs, {alone:.2f} → {beside:.2f} ms, client late by "
                  f"{soak.worst_lag_ms:.0f} ms at p99 in the worst phase")  # fmt: skip
    at = [reading.at_s for reading in soak.readings]
    for process in ("front", "core"):
        for field, bound, unit, scale in (
            ("rss_bytes", GROWTH_MIB, "MiB", MIB), ("fds", GROWTH_FDS, "descriptors", 1),
            ("threads", GROWTH_THREADS, "threads", 1),
        ):  # fmt: skip
            values = [getattr(reading, f"{process}_{field}") / scale for reading in soak.readings]
            shown = " → ".join(f"{value:.0f}" for value in values[:: max(1, len(values) // 5)])
            grown = growth_of_second_half(at, values) if values else None
            outcome.below(f"{process}: {unit} level off", grown, bound, f"{unit} more in the second half", shown)


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """A mixed load for 30 minutes, or `--minutes`."""
    minutes = arguments.minutes or (0.5 if arguments.short else 30)
    phase_seconds = 4.0 if arguments.short else 10.0
    with contextlib.ExitStack() as stack:
        folder: Path = stack.enter_context(temporary_folder())
        # A KV pool takes memory as it fills: this one is full before the second half.
        options = ["--run-dir", str(folder / "run"), "--num-kv-blocks", str(KV_BLOCKS)]
        (folder / "access.yaml").write_text(ACCESS)
        options += ["--access", str(folder / "access.yaml"), "--usage-dir", str(folder / "usage")]
        options += ["--send-seconds", str(SEND_SECONDS)]
        server = stack.enter_context(serving(*options))
        call_all(server.url, loops=[well_behaved(3), *abuse(3)])  # whatever is loaded at first use
        soak = Soak(server, phase_seconds)
        ends, number = time.monotonic() + minutes * 60, 0
        while time.monotonic() < ends or number < 3:
            soak.cycle(number)
            number += 1
        judge(outcome, soak)
        outcome.check("no traceback in the log", "Traceback" not in server.text(), f"{len(server.text()):,} characters")
        server.send_signal(15)
        code = server.wait(60)
        outcome.check("SIGTERM ends it with exit code 0", code == 0 and not server.group(), f"exit code {code}")
        faults = check_server_run(folder / "run")
        outcome.check("the run directory can be read and compacted", not faults, faults or "whole")


if __name__ == "__main__":
    main("soak", run, minutes={"type": float, "help": "30 by default, or half a minute with --short"})
