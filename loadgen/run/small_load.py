"""A small load for a server of which nothing is known: it is announced, adapts to the server, and has bounds.

First a few requests one at a time. Then more at a rate below what one request at a time would reach. The load generator
itself keeps the bounds: it stops at the first failure, and where requests pile up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sojourn.loadgen.client.event_log import request_drain
from sojourn.loadgen.run.experiment import OnProgress, Progress, load_url
from sojourn.loadgen.scenario.arrivals import Concurrency
from sojourn.loadgen.scenario.options import LoadOptions, made_scenario
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.listing import ALONE, ALONE_SCENARIO

ALONE_REQUESTS, ALONE_S = 5, 10.0
PACED_REQUESTS, PACED_S, MOST_RPS = 80, 60.0, 3.0
FEWEST_PACED = 3
LOAD_SHARE = 0.5  # of the rate that one request at a time would reach
MOST_IN_FLIGHT, MOST_FAILURES = 4, 1
TIMEOUT_S = 30.0  # of a request
LOOKS, LEVEL = (24, 48), 0.95  # after so many requests, enough for a verdict, it is asked whether most meet the SLO
ANSWERED = "the answer is known"
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 32
WORDS_ERROR = 1.15  # a prompt that is measured in words may have so many times its tokens


@dataclass(frozen=True, slots=True)
class SmallLoad:
    """What is sent at most. The options may change the form of the requests, not their number."""

    asked: LoadOptions
    tokenizer: str | None = None

    @property
    def options(self) -> LoadOptions:
        return replace(self.asked, prompt_tokens=self.asked.prompt_tokens or PROMPT_TOKENS,
                       output_tokens=self.asked.output_tokens or OUTPUT_TOKENS)  # fmt: skip

    @property
    def most_requests(self) -> int:
        return ALONE_REQUESTS + PACED_REQUESTS

    @property
    def most_prompt_tokens(self) -> int:
        exact = self.most_requests * (self.options.prompt_tokens or 0)
        return exact if self.tokenizer else math.ceil(exact * WORDS_ERROR)

    @property
    def most_output_tokens(self) -> int:
        return self.most_requests * (self.options.output_tokens or 0)

    @property
    def most_seconds(self) -> float:
        return ALONE_S + PACED_S + 2 * TIMEOUT_S

    def sentences(self) -> list[tuple[str, str]]:
        """What is announced before the first request."""
        prompt, output = self.most_prompt_tokens, self.most_output_tokens
        return [
            ("sends at most", f"{self.most_requests} requests, {prompt:,} prompt and {output:,} output tokens, in "
                              f"{self.most_seconds:.0f} s"),
            ("first", f"{ALONE_REQUESTS} requests one at a time"),
            ("then", f"up to {PACED_REQUESTS} at a rate the server keeps up with: {MOST_RPS:g} per second or less"),
            ("stops at", f"a failure or refusal (429), {MOST_IN_FLIGHT} in flight, or a known answer"),
        ]  # fmt: skip

    def alone(self) -> Scenario:
        """One request at a time."""
        made = self._bounded(ALONE_SCENARIO, replace(self.options, requests=ALONE_REQUESTS))
        loop = Concurrency(process="concurrency", in_flight=1, count=ALONE_REQUESTS, duration_s=ALONE_S)
        return made.model_copy(update={"arrivals": loop})

    def paced(self, rate_rps: float) -> Scenario:
        return self._bounded("first", replace(self.options, rate=rate_rps, requests=PACED_REQUESTS, duration_s=PACED_S))

    def _bounded(self, name: str, asked: LoadOptions) -> Scenario:
        made = made_scenario(asked, name=name)
        bounds = {"stop_at_in_flight": MOST_IN_FLIGHT, "stop_at_failures": MOST_FAILURES, "timeout_s": TIMEOUT_S}
        return made.model_copy(update={"target": made.target.model_copy(update=bounds)})


def answer_of(good: int, ended: int) -> str:
    """Whether most requests meet the SLO, in words, by an exact sign test; "" while it is open. Several looks share the
    chance of an error. At this rate requests hardly meet each other, so that each counts as one observation."""
    most = max(good, ended - good)
    by_chance = sum(math.comb(ended, number) for number in range(most, ended + 1)) / 2**ended
    if by_chance > (1 - LEVEL) / 2 / len(LOOKS):
        return ""
    return (
        f"{ANSWERED}: {'most' if good == most else 'fewer than half of the'} requests meet the SLO, {good} of {ended}"
    )


class _Question:
    """Shows the progress of a load, and ends the load once the answer is known."""

    def __init__(self, run_dir: Path, show: OnProgress):
        self._run_dir, self._show, self._looks = run_dir, show, list(LOOKS)

    def __call__(self, progress: Progress) -> None:
        self._show(progress)
        classes = progress.live.classes if progress.live is not None else []
        ended, good = sum(each.ended for each in classes), sum(each.good for each in classes)
        if not self._looks or ended < self._looks[0]:
            return
        self._looks = [look for look in self._looks if look > ended]
        if answer := answer_of(good, ended):
            self._looks = []
            request_drain(self._run_dir, answer)


def paced_rate(mean_s: float) -> float | None:
    """The rate for a server that answers one request alone in `mean_s`; None where too few requests would come."""
    rate = min(MOST_RPS, LOAD_SHARE / mean_s)
    return rate if rate * PACED_S >= FEWEST_PACED else None


def send_small_load(
    load: SmallLoad,
    base_url: str,
    run_dir: Path,
    say: Callable[[str], None],
    progress: OnProgress = lambda _: None,
    **sent: Any,
) -> tuple[RunDirectory, float | None]:
    """Sends it, and says what each part found. Returns the last run and the rate that the server kept up with, None
    where it kept up with none. `sent` goes to `load_url`. Raises EndpointError."""
    alone = load_url(load.alone(), base_url, run_dir.with_name(run_dir.name + ALONE), tokenizer=load.tokenizer,
                     progress=progress, **sent)  # fmt: skip
    rows = alone.requests()
    served = rows[rows.status == "ok"]
    if len(served) < len(rows) or served.empty:
        say(f"{len(rows) - len(served)} of {len(rows)} requests that were sent one at a time failed; nothing more is "
            "sent")  # fmt: skip
        return alone, None
    mean_s = float(served.e2e_ms.mean()) / 1e3
    rate = paced_rate(mean_s)
    if rate is None:
        say(f"one request alone takes {mean_s:.1f} s, too long for a load within {PACED_S:.0f} s; nothing more is sent")
        return alone, None
    say(f"one request alone takes {mean_s * 1e3:,.0f} ms; now at most {PACED_REQUESTS}, at {rate:.2g} per second")
    paced = load_url(load.paced(rate), base_url, run_dir, tokenizer=load.tokenizer,
                     progress=_Question(run_dir, progress), **sent)  # fmt: skip
    stopped = paced.meta().get("stopped_early")
    kept_up = stopped is None or stopped["reason"].startswith(ANSWERED)
    if stopped is not None:
        say(f"stopped after {stopped['after_s']:.0f} s: {stopped['reason']}")
    return paced, rate if kept_up else None
