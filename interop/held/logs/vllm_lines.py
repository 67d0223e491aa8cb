"""The lines in which vLLM's log says its figures, and the lines of drafts behind them."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from sojourn.interop.held.given import Line
from sojourn.interop.held.held import BenchmarkFigures, Event
from sojourn.interop.held.logs.clock import STAMP, Clock, stated_elsewhere
from sojourn.interop.held.logs.series import Said, figures_of

RATES = "Avg prompt throughput:"
FIGURES = re.compile(
    r"(?:\(?(?P<process>[\w.:\- ]*pid=\d+)[^()\n]{0,40}\) ?)?"
    r"(?:(?:INFO|DEBUG|WARNING)[: ]+)?(?P<stamp>(?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)?(?:,\d+)? ?"
    r"(?:\[?(?P<file>[\w./]+\.py):\d+\] ?)?"
    r"(?:Engine (?P<engine>\d+): |(?P<several>\d+) Engines Aggregated: )?"
    r"Avg prompt throughput: (?P<prompt>[\d.]+) tokens/s, "
    r"Avg generation throughput: (?P<generation>[\d.]+) tokens/s, "
    r"Running: (?P<running>\d+) reqs, (?:Swapped: (?P<swapped>\d+) reqs, )?(?:Waiting|Pending): (?P<waiting>\d+) reqs"
    r"(?P<rest>(?:, (?:Deferred: \d+ reqs|KV fetch: [^%\n]*? completed waiting|Preemptions: \d+))*)"
    r"(?:, (?P<device>[A-Z]+) KV cache usage: (?P<kv>[\d.]+)%)?"
    r"(?P<tail>(?:, [A-Z][\w ]*: [\d.]+(?:%| reqs| [A-Za-z]+/s[\w/]*(?: [\d.]+ [A-Za-z]+/s[\w/]*)*))*)"
)
# What may follow a whole line: its end, engine V0's swap space, JSON's end, or the line of another process.
AFTER = re.compile(r"[.\s]*(?:$|,? ?CPU KV cache usage: [\d.]+%|[\"}\\]|\(|(?:INFO|ERROR|WARNING|DEBUG)\b|```)")
DRAFTS = re.compile(
    r"SpecDecoding metrics: .*?Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens[, ]"
)
HIT_RATE = re.compile(r"(?<!External )(?<!MM )[Pp]refix cache hit rate: (?:GPU: )?(?P<share>[\d.]+)%")
EXTERNAL = re.compile(r"External prefix cache hit rate: (?P<share>[\d.]+)%")
DEFERRED = re.compile(r"Deferred: (\d+) reqs")
PREEMPTIONS = re.compile(r"Preemptions: (\d+)")
RUNNING, WAITING, KV = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
GENERATED, PROMPT = "vllm:generation_tokens_total", "vllm:prompt_tokens_total"
LOAD = ("generation", "prompt", "running", "waiting")  # groups of a line
PREEMPTED, SWAPPED = "vllm:num_preemptions_total", "vllm:num_requests_swapped"
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
HIT_GAUGE = "vllm:gpu_prefix_cache_hit_rate"
STANDS_S = 60.0
BY_SERVER = "vLLM's log: averages over its own intervals"


class Figures(NamedTuple):
    """A whole line of figures."""

    match: "re.Match[str]"
    ns: int | None
    line: Line

    def share(self, pattern: "re.Pattern[str]") -> float | None:
        """What the end of the line says in percent."""
        found = pattern.search(self.match["tail"] or "")
        return float(found["share"]) / 100 if found is not None else None

    @property
    def process(self) -> str:
        return self.match["process"] or ""


def figures_in(lines: list[Line], clock: Clock) -> Iterator[Figures]:
    """The lines of figures, with their moments: those of whoever carried the log where all have one."""
    found = [(match, line) for line in lines if RATES in line.text for match in FIGURES.finditer(line.text)]
    found = [(match, line) for match, line in found if AFTER.match(line.text[match.end() :])]
    outside = stated_elsewhere([line.ns for _, line in found])
    for match, line in found:
        yield Figures(match, line.ns if outside else clock.ns(STAMP.match(match["stamp"] or "")), line)


def is_v1(found: list[Figures]) -> bool:
    return not any(each.match["swapped"] for each in found)


def said_by(found: list[Figures], lines: list[Line], starts: set[int]) -> list[Said] | None:
    """Each line with its owner; None where several fronts write of the same engine."""
    overlap = _overlap(found)
    if overlap and any(each.process.startswith("ApiServer_") for each in found):
        return None
    cold, drafts = no_hits(found), _drafts(lines)
    said, last, pending = [], None, sorted(starts)
    for each in found:
        number = each.line.number
        is_new = last is not None and not overlap and each.process != last.process
        is_new = is_new or bool(said and pending and pending[0] < number)
        pending = [start for start in pending if start > number]
        last = each
        owner = [("engine", str(int(each.match["engine"] or 0)))] + ([("instance", each.process)] if overlap else [])
        rates = {GENERATED: float(each.match["generation"])}
        if cold:
            rates[PROMPT] = float(each.match["prompt"])
        preempted = PREEMPTIONS.search(each.match["rest"] or "")
        gains = ({PREEMPTED: float(preempted[1])} if preempted is not None else {}) | drafts.get(number, {})
        said.append(Said(int(each.ns or 0), number, tuple(owner), _gauges(each), rates, gains, is_new))
    return said


def _overlap(found: list[Figures]) -> bool:
    """Whether several processes write at the same time."""
    spans: dict[str, tuple[int, int]] = {}
    for each in found:
        begin, end = spans.get(each.process, (each.ns or 0, each.ns or 0))
        spans[each.process] = (min(begin, each.ns or 0), max(end, each.ns or 0))
    return any(later[0] < before[1] for before, later in pairwise(sorted(spans.values())))


def _gauges(each: Figures) -> dict[str, float]:
    match, hit = each.match, each.share(HIT_RATE)
    gauges = {RUNNING: float(match["running"]), WAITING: float(match["waiting"])}
    if match["swapped"]:
        gauges[SWAPPED] = float(match["swapped"])
    if match["kv"]:
        gauges[KV] = float(match["kv"]) / 100
    return gauges if hit is None else gauges | {HIT_GAUGE: hit}


def no_hits(found: list[Figures]) -> bool:
    """Whether the prompt rate is of all prompt tokens: no cache had any of them."""
    return not any(each.share(HIT_RATE) or each.share(EXTERNAL) for each in found)


def _drafts(lines: list[Line]) -> dict[int, dict[str, float]]:
    """Line of figures → drafted and accepted tokens of the line behind it, which has the same interval."""
    found, last = {}, None
    for line in lines:
        if RATES in line.text:
            last = line.number
        elif last is not None and "SpecDecoding metrics" in line.text and (drafts := DRAFTS.search(line.text + " ")):
            found[last] = {DRAFTED: float(drafts["drafted"]), ACCEPTED: float(drafts["accepted"])}
    return found


def hangs_of(said: list[Said], lines: list[Line], moment: Callable[[Line], int | None]) -> list[Event]:
    """Times in which requests ran or waited, and no token came."""
    events, last = [], max((ns for line in lines if (ns := moment(line)) is not None), default=0)
    by_owner: dict[tuple, list[Said]] = {}
    for each in said:
        by_owner.setdefault(each.owner, []).append(each)
    for each in by_owner.values():
        runs: list[list[Said]] = [[]]
        for line in each:
            stands = line.gauges[RUNNING] > 0 and not any(line.rates.values())
            moves = bool(runs[-1]) and line.gauges.get(KV) != runs[-1][-1].gauges.get(KV)
            runs += [[]] if moves or not stands else []
            if stands:
                runs[-1].append(line)
        for still in filter(None, runs):
            until_ns = max(still[-1].ns, last) if still[-1] is each[-1] else still[-1].ns
            seconds = (until_ns - still[0].ns) / 1e9
            if seconds >= STANDS_S:
                events.append(_hang(still, seconds, ended_in_silence=until_ns > still[-1].ns))
    return events


def _hang(still: list[Said], seconds: float, ended_in_silence: bool) -> Event:
    line = still[-1]
    silent = ", then no line of figures while the log goes on" if ended_in_silence else ""
    return Event(
        kind="hang", line=still[0].line, ns=still[0].ns,
        sentence=f"{line.gauges[RUNNING]:.0f} running and {line.gauges[WAITING]:.0f} waiting requests, no token and no "
        f"change of the KV use for {seconds:.0f} s{silent}: a hang, or one very long prompt",
    )  # fmt: skip


def means_of(found: list[Figures]) -> BenchmarkFigures | None:
    """What the lines say on average, over those that show load. Lines of several engines at one moment are one look:
    what they say is added, but for the KV use, of which the fullest pool counts."""
    busy = [look for look in _looks(found) if any(float(each.match[name]) for each in look for name in LOAD)]
    prompt = "prompt_tokens_per_s" if no_hits(found) else "prompt_tokens_per_s_as_logged"

    def column(name: str, together: Callable[[list[float]], float] = sum) -> list[float]:
        shown = [[float(each.match[name]) for each in look if each.match[name]] for look in busy]
        return [together(values) for values in shown if values]

    hits = [[share for each in look if (share := each.share(HIT_RATE)) is not None] for look in busy]
    return figures_of("vLLM log", BY_SERVER, {
        "output_tokens_per_s": ("tokens/s", column("generation")),
        prompt: ("tokens/s", column("prompt")),
        "running": ("requests", column("running")),
        "waiting": ("requests", column("waiting")),
        "deferred": ("requests", [sum(map(_deferred, look)) for look in busy] if any(map(_deferred, found)) else []),
        "kv_use": ("share", [percent / 100 for percent in column("kv", max)]),
        "hit_rate": ("share", [fmean(shares) for shares in hits if shares]),
    })  # fmt: skip


def _deferred(each: Figures) -> float:
    """Of the waiting requests, those that the scheduler passes over."""
    found = DEFERRED.search(each.match["rest"] or "")
    return float(found[1]) if found is not None else 0.0


def _looks(found: list[Figures]) -> list[list[Figures]]:
    """The lines by look: one of each engine. A look that lacks an engine, as at a cut, is left out."""
    looks: list[dict[str, Figures]] = []
    for each in found:
        engine = each.match["engine"] or ""
        if not looks or engine in looks[-1]:
            looks.append({})
        looks[-1][engine] = each
    whole = max(map(len, looks), default=0)
    return [list(look.values()) for look in looks if len(look) == whole]
