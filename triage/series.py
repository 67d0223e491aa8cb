"""Series of logs and pages: which are of one server, how they are judged, and what a line of requests alone shows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sojourn.diagnosis.causes.batch_cap import larger_batch
from sojourn.diagnosis.statements.means import ACCEPTED, DRAFTED, FEW, of_family
from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import TOOL, is_same_server
from sojourn.interop.sources.pressure import JUST_ENDED, KV_USE, RUNNING, Waiting
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.periods import Periods, periods
from sojourn.triage.document import Likely

FEWEST_LINES, MOSTLY = 3, 0.9  # samples with a line in front of the batch, and the share of them that look alike
CAP, STATED_CAP, KV_POOL, OPEN = 0.75, 0.9, 0.8, 0.6  # confidence
KV_TOP = 0.9  # of a pool: a few blocks short of it no request fits
SMALL_BUDGET, LARGE_BLOCK = 256, 128  # tokens of a step; of a block
DEFAULT_CAPS = (128, 256, 512, 1024)  # of vLLM's versions and devices
MANY_DRAFTS, HARDLY = 500, 0.1  # drafted tokens; of which so few are accepted


def groups(held: Sequence[Held]) -> Iterator[list[Held]]:
    """What is judged together: each log alone, the dated pages of one server as one series."""
    pages = sorted(
        (each for each in held if is_page(each) and each.is_wall_clock), key=lambda each: each.series[0]["ns"]
    )
    yield from ([each] for each in held if each.series and not is_page(each))
    chain: list[Held] = []
    for page in pages:
        if chain and not is_same_server(chain[-1], page):
            yield chain
            chain = []
        chain.append(page)
    if chain:
        yield chain


def undated(held: Sequence[Held]) -> Iterator[tuple[Held, Held]]:
    """Pages without a moment that follow each other, as they were given: means lie between them, and no rate."""
    pages = [each for each in held if is_page(each) and not each.is_wall_clock]
    yield from ((first, second) for first, second in pairwise(pages) if is_same_server(first, second))


def is_page(held: Held) -> bool:
    return held.kind == TOOL and bool(held.series)


def judged(held: Sequence[Held], bounds: Mapping[str, float]) -> Periods | None:
    """The worst period, as of any series; None where the rows hold fewer than two moments."""
    names = ", ".join(dict.fromkeys(each.name for each in held))
    return periods((row for each in held for row in each.series), names, bounds)


def line_facts(server: WatchedServer) -> list[str]:
    """What the gauges say of a line that the watch names no cause for."""
    waiting = server.view.waiting if server.view is not None else None
    if waiting is None or waiting.samples < FEWEST_LINES or server.state != "cannot tell":
        return []
    return [f"Requests wait in {waiting.samples} of {server.scrapes} samples, up to {waiting.largest:,.0f} at once"]


def causes_of(group: Sequence[Held], server: WatchedServer, settings: Mapping[str, Any], level: Any) -> list[Likely]:
    """What the gauges carry where the watch names no cause: drafts that are rejected, and what holds a line."""
    view = server.view
    if view is None or any(each.role == "cause" for each in server.findings):
        return []
    found = [_rejected(server, level), _deferred(group, server, settings, level)]
    if found[1] is None:
        found.append(_of_line(group, server, settings, level))
    return [each for each in found if each is not None]


def _rejected(server: WatchedServer, level: Any) -> Likely | None:
    counted = server.view.totals if server.view is not None else {}
    drafted, accepted = of_family(counted, DRAFTED), of_family(counted, ACCEPTED)
    if not drafted or drafted < MANY_DRAFTS or accepted is None or accepted > HARDLY * drafted:
        return None
    share = accepted / drafted
    return Likely(
        key="rejected_drafts", cause=f"{1 - share:.0%} of the drafts are rejected: verifying them gains nothing",
        confidence=OPEN, level=level, evidence=f"{share:.1%} of {drafted:,.0f} drafts were accepted",
        rivals=["a device with free compute, on which rejected drafts cost little"], source=server.name,
    )  # fmt: skip


def _deferred(group: Sequence[Held], server: WatchedServer, settings: Mapping[str, Any], level: Any) -> Likely | None:
    """Requests that the scheduler passes over: they wait for something else than room."""
    figures = group[0].figures
    deferred = figures.value("deferred", "mean") if figures is not None else None
    waiting = figures.value("waiting", "mean") if figures is not None else None
    if not deferred or not waiting or deferred < MOSTLY * waiting:
        return None
    others = [name for name in ("kv_transfer_config", "enable_lora") if settings.get(name)]
    if others:  # they defer requests, too: nothing in a log tells them apart
        return None
    return Likely(
        key="slow_grammar", cause="requests wait for their grammar to be compiled, not for room in the batch",
        confidence=CAP, level=level,
        evidence=f"{deferred:,.1f} of {waiting:,.1f} waiting requests are deferred, on average over lines with load",
        rivals=["requests whose input is still sent"], source=server.name,
    )  # fmt: skip


class _Line(NamedTuple):
    """A line of requests: what the gauges showed meanwhile, and what the server's flags state."""

    server: WatchedServer
    waiting: Waiting
    settings: Mapping[str, Any]
    level: Any
    running: float  # at most
    kv_use: float  # at most
    hit_rate: float | None  # at most

    @property
    def shown(self) -> str:
        return f"in {self.waiting.samples} samples with a line"

    @property
    def is_flat(self) -> bool:
        return (self.waiting.at_largest_batch or 0.0) >= MOSTLY

    def likely(self, key: str, cause: str, confidence: float, evidence: str, rival: str, change: str = "") -> Likely:
        return Likely(key=key, cause=cause, confidence=confidence, level=self.level, evidence=evidence, rivals=[rival],
                      source=self.server.name, change=change)  # fmt: skip


def _of_line(group: Sequence[Held], server: WatchedServer, settings: Mapping[str, Any], level: Any) -> Likely | None:
    """What holds a line, by gauges and stated settings alone."""
    view = server.view
    if view is None or view.waiting is None or view.waiting.samples < FEWEST_LINES:
        return None
    running = view.gauges[RUNNING].largest if RUNNING in view.gauges else 0.0
    used = view.gauges[KV_USE].largest if KV_USE in view.gauges else 0.0
    hits = group[0].figures.value("hit_rate", "max") if group[0].figures is not None else None
    line = _Line(server, view.waiting, settings, level, running, used, hits)
    change = larger_batch(view.settings["batch cap"], running) if "batch cap" in view.settings else ""
    return _full_pool(line) or _small_budget(line) or _no_block(line) or _capped(line, change) or _overloaded(line)


def _full_pool(line: _Line) -> Likely | None:
    full = line.waiting.with_kv_full or 0.0
    if full >= MOSTLY:
        return line.likely("kv_pool", "the KV cache is full: requests wait for room in it", KV_POOL,
                           f"{line.shown}, {full:.0%} have a KV use at its top",
                           "a limit on the batch that is reached at the same time")  # fmt: skip
    if line.waiting.one_more_fits is False and line.running < _cap(line.settings):
        return line.likely("kv_pool", "the KV cache is full at its largest batch: requests wait for room in it", OPEN,
                           f"{line.shown} at most {line.running:,.0f} run, at a KV use of {line.kv_use:.0%}: no other "
                           "of their size fits", "a full device")  # fmt: skip
    if line.kv_use < KV_TOP or line.is_flat or _is_cap(line.running, line.settings):
        return None
    return line.likely("kv_pool", "the KV cache fills: requests wait for room in it", OPEN,
                       f"{line.shown} the KV use rises to {line.kv_use:.0%}, and the batch varies below its limit",
                       "a full device")  # fmt: skip


def _small_budget(line: _Line) -> Likely | None:
    budget = line.settings.get("max_num_batched_tokens")
    if not isinstance(budget, int) or budget >= SMALL_BUDGET or line.running >= _cap(line.settings):
        return None
    return line.likely("token_budget", f"a step takes {budget} tokens at most, by its flags: prompts wait", CAP,
                       f"{line.shown} at most {line.running:,.0f} run, with a KV use of {line.kv_use:.0%} at most",
                       "a device that is full at that batch")  # fmt: skip


def _no_block(line: _Line) -> Likely | None:
    block = line.settings.get("block_size")
    is_large = isinstance(block, int) and block >= LARGE_BLOCK
    if not is_large or line.hit_rate != 0 or not line.settings.get("enable_prefix_caching"):
        return None
    return line.likely("prefix_sub_block", f"no prompt finds a whole block of {block} tokens in the cache", OPEN,
                       f"{line.shown} the hit rate is 0 with the cache on, and blocks of {block} tokens by the flags",
                       "prompts that share no prefix")  # fmt: skip


def _capped(line: _Line, change: str) -> Likely | None:
    is_free = (line.waiting.with_kv_free or 0.0) >= MOSTLY
    is_stated = line.running == _cap(line.settings)
    reaches = line.is_flat or (is_stated and line.running <= FEW)  # of few requests some end together between two lines
    if not line.running or not reaches or not is_free or not _is_cap(line.running, line.settings):
        return None
    reached = line.waiting.at_largest_batch or 0.0
    stated = ", the limit that its flags state" if is_stated else ""
    return line.likely("batch_cap", f"a limit on the batch: {line.running:,.0f} run and others wait beside free KV",
                       STATED_CAP if is_stated else CAP,
                       f"in {reached:.0%} of {line.waiting.samples} samples with a line so many "
                       f"run{stated}", "a device that is full at that batch: then a larger limit gains nothing",
                       change)  # fmt: skip


def _overloaded(line: _Line) -> Likely | None:
    if not line.running or line.waiting.largest < line.running or line.waiting.with_kv_full is None:
        return None
    return line.likely("overload", "more arrives than is served: the line is longer than the batch", OPEN,
                       f"{line.shown} up to {line.waiting.largest:,.0f} wait beside {line.running:,.0f} that run; the "
                       "batch is below its limit or varies",
                       "the KV cache, which is full at times" if line.kv_use >= KV_TOP
                       else "a burst that is over, or a few long prompts")  # fmt: skip


def _cap(settings: Mapping[str, Any]) -> float:
    """The stated limit on the batch; infinite where none is stated."""
    return float(settings.get("max_num_seqs") or settings.get("max_running_requests") or math.inf)


def _is_cap(running: float, settings: Mapping[str, Any]) -> bool:
    """Whether a batch of that size can be at its limit. Where a server's flags are known and name none, it is a
    default: then a batch of another size is held by something else."""
    cap = _cap(settings)
    if math.isfinite(cap):
        return running >= cap - JUST_ENDED
    return "max_model_len" not in settings or any(running in (each, each - JUST_ENDED) for each in DEFAULT_CAPS)
