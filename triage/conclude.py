"""What several pieces of evidence say together."""

import re
import shlex
import tempfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import msgspec

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.sensor_facts import Flight
from sojourn.diagnosis.verdict import Finding
from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import between
from sojourn.interop.held.registry import read_file, read_held
from sojourn.interop.imported.read import write_run
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.load_only import NOT_SHOWN
from sojourn.live.watch.verdict import NO_OBJECTIVE
from sojourn.live.watch.watcher import watch_once
from sojourn.metrics.errors import InputError, RunDataError
from sojourn.triage import sensor_rules
from sojourn.triage.decay import decay_of
from sojourn.triage.document import Certain, Level, Likely, Seen, State, Triage
from sojourn.triage.event_rules import EVENTS
from sojourn.triage.objectives import ALL_AT_ONCE, judge
from sojourn.triage.series import causes_of, groups, is_page, judged, line_facts, undated
from sojourn.triage.summary_rules import LOG, RULES, WATCH
from sojourn.triage.sweep import knee
from sojourn.triage.together import may_be_one, restarts_in, still_open
from sojourn.triage.words import figures_in_words, seen_of, with_figures

IMPORT = "sojourn import {}"
BEFORE_AND_AFTER = 3.0  # of the worth of a command, where two files of one kind are given
ELSEWHERE = 1.0  # worth of a command that looks where an event happened, not at a page that may not come any more
OVERLOADED = re.compile(r"^Overloaded: .*\. (?=\d)")  # a cause, before what was measured
LEAST = 0.5  # of the confidence of a cause: with less it is no headline, and an alternative is left out


class Conclusion:
    """Collects what each piece says."""

    def __init__(self) -> None:
        self.headline = ""  # of a server that was judged over time
        self.certain: list[Certain] = []
        self.likely: list[Likely] = []
        self.ranks: dict[int, float] = {}  # of those that stand behind another, whatever their own confidence
        self.unknowable: list[str] = []
        self.late_unknowable: list[str] = []  # of less use than the others
        self.states: list[State] = []
        self.nexts: list[tuple[float, str]] = []  # how much each is worth, and the command

    def state_certainly(self, sentence: str, level: Level, source: str, is_problem: bool = True) -> None:
        self.certain.append(Certain(sentence=sentence, level=level, source=source, is_problem=is_problem))
        self.states.append("problem" if is_problem else "cannot tell")


def triage_given(
    files: Sequence[str] = (), texts: Mapping[str, bytes | str] | None = None, urls: Sequence[str] = (),
    bounds: Mapping[str, float] | None = None, *, seconds: float = 10.0,
) -> Triage:  # fmt: skip
    """What all of it says together. `texts`: by the name to show; `urls`: servers whose page is read for so many
    seconds. Raises InputError where nothing can be read, and for an address that is none."""
    held: list[Held] = []
    unread: list[str] = []
    for name in (*files, *(texts or {})):
        try:
            held += read_held(texts[name], name) if texts and name in texts else read_file(Path(name))
        except InputError as error:
            unread.append(str(error))
    watched = watch_once(urls, seconds, bounds).servers if urls else []
    if not held and not watched:
        raise InputError(
            "; ".join(unread) or "nothing was given; name files or an address, or - for the standard input"
        )
    return conclude(held, bounds or {}, unread, watched)


def conclude(
    held: Sequence[Held], bounds: Mapping[str, float], unread: Sequence[str] = (),
    watched: Sequence[WatchedServer] = (),
) -> Triage:  # fmt: skip
    found = Conclusion()
    caused = _series(found, held, bounds)
    together = {each.name for group in (*groups(held), *undated(held)) if len(group) > 1 for each in group}
    restarts = restarts_in(held)
    for restart in restarts:
        found.state_certainly(restart.sentence, "page", restart.newer.name, is_problem=False)
        found.headline = found.headline or restart.sentence
        found.nexts.append((0.5, WATCH))
    for each in held:
        if any(each is restart.older for restart in restarts):
            _past(found, each)
        elif each.name not in together:  # pages that are judged together say no more one by one
            _summary(found, each, each.name in caused, _requests(found, each, bounds))
            _objectives(found, each, bounds)
            found.unknowable += still_open(each, held, restarts)
        _events(found, each)
        _before_the_end(found, each)
        _sensors(found, each, sensor_rules.flight_beside(each, held))
    _sweep(found, held)
    if not restarts and (command := _before_and_after(held, together)):
        found.nexts.append((BEFORE_AND_AFTER, command))
    if not bounds:
        _latencies_of_page(found, held, [each.older for each in restarts])
    for server in watched:
        add_watched(found, server, "page")
    seen = [*map(seen_of, held), *map(_seen_live, watched)]
    is_summary = any(each.figures is not None and _level(each) == "summary" for each in held)
    answer = _answer(found, seen, list(unread), is_summary)
    headline = with_figures(answer.headline, held)
    return msgspec.structs.replace(answer, headline=headline, next=_of_server(answer.next, held))


def _objectives(found: Conclusion, held: Held, bounds: Mapping[str, float]) -> None:
    """Of a summary; logs and pages are judged over time, and rows one by one."""
    if held.figures is None or held.series or held.requests is not None:
        return
    for each in judge(held.figures, bounds):
        if each.is_certain:
            found.state_certainly(each.sentence, "summary", _source(held), each.is_problem)
        else:
            found.unknowable.append(each.sentence)
    found.unknowable += [ALL_AT_ONCE] if len(bounds) > 1 else []


def _before_and_after(held: Sequence[Held], together: Container[str]) -> str:
    """The command that compares two files of one kind; "" of anything else."""
    names = [each.name for each in held]
    is_pair = len(set(names)) == 2 == len(names) and held[0].kind == held[1].kind and all(each.figures for each in held)
    if not is_pair or any(name in together or not Path(name).is_file() for name in names):
        return ""
    return f"sojourn compare {' '.join(map(shlex.quote, names))}"


def _past(found: Conclusion, held: Held) -> None:
    """What a page of an older process showed: no present problem, and no cause."""
    past = Conclusion()
    _summary(past, held)
    for each in past.certain:
        found.state_certainly(f"Before, {held.name} showed: {each.sentence}", each.level, held.name, is_problem=False)


def _latencies_of_page(found: Conclusion, held: Sequence[Held], past: Sequence[Held]) -> None:
    """A log shows that few wait, and a page of its server how long requests take."""
    for log, page in ((log, page) for log in held for page in held if may_be_one(log, page)):
        figures = page.figures
        if figures is None or figures.value("e2e_ms") is None or any(page is each for each in past):
            continue
        for place, each in enumerate(found.certain):
            if each.source != log.name or not each.sentence.endswith(f"; {NOT_SHOWN}"):
                continue
            few = each.sentence.removesuffix(f"; {NOT_SHOWN}")
            found.certain[place] = msgspec.structs.replace(each, sentence=few)
            told = figures_in_words(figures).partition(", running")[0]
            found.headline = f"{few}; by {page.name} {told}; objectives decide whether that is good"
            if figures.value("queue_ms") is not None and "few requests wait" in few:
                found.states.append("no problem seen")


def _summary(found: Conclusion, held: Held, is_judged: bool = False, meets: bool = False) -> None:
    """`is_judged`: its series gave a cause, so that its means add none. `meets`: its requests meet their objectives, so
    that the shape of their latencies is a fact and no problem."""
    if held.figures is None:
        return
    source = _source(held)
    for note in held.notes:
        if note.startswith("figures that should agree differ"):
            found.state_certainly(f"{note[0].upper()}{note[1:]}", _level(held), source, is_problem=False)
    for rule in RULES:
        fact = rule.looks(held.figures)
        if fact is None or (is_judged and fact.confidence is not None):
            continue
        is_problem = fact.is_problem and not (meets and rule.is_shape)
        found.state_certainly(fact.certain, _level(held), source, is_problem)
        found.unknowable += [rule.unknown] if rule.unknown else []
        if fact.confidence is not None and rule.cause:
            found.likely.append(Likely(
                key=rule.key, cause=rule.cause, confidence=fact.confidence, level=_level(held), evidence=fact.evidence,
                rivals=list(rule.rivals), source=source,
            ))  # fmt: skip
        if rule.next:
            found.nexts.append(((fact.confidence or 0.0) + is_problem, rule.next))


def _level(held: Held) -> Level:
    if "log" in held.kind:
        return "log"
    return "page" if "page" in held.kind else "summary"


def _events(found: Conclusion, held: Held) -> None:
    for event in held.events:
        rule = EVENTS[event.kind]
        times = f" ({event.times} times)" if event.times > 1 else ""
        is_problem = rule.state in ("problem", "stuck")
        found.state_certainly(f"{event.sentence}{times}, line {event.line:,}", "log", held.name, is_problem)
        found.states.append(rule.state if is_problem else "cannot tell")
        worth = rule.confidence if rule.next == WATCH else ELSEWHERE
        found.nexts.append((worth + is_problem, rule.next))
        if rule.cause and not any(each.key == event.kind and each.source == held.name for each in found.likely):
            found.likely.append(Likely(
                key=event.kind, cause=rule.cause, confidence=rule.confidence, level="log",
                evidence=f"line {event.line:,}: {event.sentence}", rivals=list(rule.rivals), source=held.name,
            ))  # fmt: skip


def _before_the_end(found: Conclusion, held: Held) -> None:
    """Behind a hang or a death tokens do not come any more: what the series shows was before."""
    last = max((row["ns"] for row in held.series), default=0)
    ends = [event for event in held.events if event.kind in ("hang", "death") and (event.ns or last) >= last]
    end = min((event.line for event in ends), default=None)
    for place, each in enumerate(found.certain):
        if end is not None and each.source == held.name and each.sentence.endswith(f"; {NOT_SHOWN}"):
            few = each.sentence.removesuffix(f"; {NOT_SHOWN}")
            before = f"Before line {end:,}: {few[0].lower()}{few[1:]}"
            found.certain[place] = msgspec.structs.replace(each, sentence=before)


def _sensors(found: Conclusion, held: Held, flight: Flight | None) -> None:
    for fact in sensor_rules.facts(held.sensors, flight):
        found.state_certainly(fact.sentence, "sensor", held.name, fact.is_problem)
        found.unknowable += [fact.unknown] if fact.unknown else []
        found.nexts.append((fact.confidence + 0.5 * fact.is_problem, fact.next))
        if fact.cause and not any(each.cause == fact.cause for each in found.likely):
            found.likely.append(Likely(
                key=fact.key, cause=fact.cause, confidence=fact.confidence, level="sensor", evidence=fact.sentence,
                rivals=[fact.rival], source=held.name,
            ))  # fmt: skip


def _requests(found: Conclusion, held: Held, bounds: Mapping[str, float]) -> bool:
    """A file with a row a request is a run, and gets the diagnosis of one: whether they meet their objectives."""
    if held.requests is None:
        return False
    imported = held.requests
    if bounds:
        objective = {"klass": "all", "source": "--slo", **bounds}
        imported = msgspec.structs.replace(imported, objectives=[objective])
    with tempfile.TemporaryDirectory(prefix="sojourn-triage-") as place:
        try:
            diagnosis = diagnose(write_run(imported, Path(place) / "run", held.name))
        except (InputError, RunDataError) as error:
            found.unknowable.append(f"the requests of {held.name}: {error}")
            return False
    meets = diagnosis.state == "healthy" and bool(imported.objectives)
    found.state_certainly(
        _without_cause(diagnosis.headline), "requests", held.name, diagnosis.state in ("degraded", "overloaded")
    )
    found.states.append("no problem seen" if meets else "cannot tell")
    found.likely += _of_findings(diagnosis.findings, "requests", held.name)
    found.unknowable += diagnosis.warnings[:2]
    found.nexts.append((1.5, IMPORT.format(held.name)))
    return meets


def _of_findings(findings: Sequence[Finding], level: Level, source: str) -> list[Likely]:
    return [_of_finding(each, level, source) for each in findings
            if each.role == "cause" or each.confidence >= LEAST]  # fmt: skip


def _without_cause(headline: str) -> str:
    """What was measured: its cause is likely, and is said there."""
    return OVERLOADED.sub("", headline).partition(", because")[0]


def _of_finding(finding: Finding, level: Level, source: str) -> Likely:
    supporting = [each for each in finding.evidence if each.supports]
    strongest = max(supporting, key=lambda each: each.weight, default=None)
    return Likely(
        key=finding.key or finding.symptom, cause=finding.cause, confidence=finding.confidence, level=level,
        evidence=strongest.statement if strongest is not None else finding.title,
        rivals=[finding.probe.rival] if finding.probe.rival else [], source=source,
    )  # fmt: skip


def _sweep(found: Conclusion, held: Sequence[Held]) -> None:
    seen = knee(held)
    if seen is not None:
        found.state_certainly(seen.sentence, "summary", seen.source, is_problem=False)
        found.likely.append(Likely(
            key="saturation", cause="the server is saturated from there on: more load only waits", confidence=0.8,
            level="summary", evidence=seen.evidence, rivals=["the client is, at that load"], source=seen.source,
        ))  # fmt: skip
        found.unknowable.append("what saturates: a limit on the batch, the device or the KV cache")
        found.nexts.append((0.8, WATCH))


def _series(found: Conclusion, held: Sequence[Held], bounds: Mapping[str, float]) -> set[str]:
    """Names of the evidence whose series gave a cause."""
    named: set[str] = set()
    many = len(list(groups(held))) > 1
    for group in groups(held):
        level: Level = "page" if is_page(group[0]) else "log"
        over_time = judged(group, bounds)
        if over_time is None:
            continue
        server, when = over_time.worst, over_time.when()
        if server.view is None and server.state == "cannot tell":
            found.unknowable.append(f"rates of {server.name}: its moments lie too far apart")
            continue
        add_watched(found, server, level, f" ({when})" if when else "")
        for fact in line_facts(server):
            found.state_certainly(fact, level, server.name)
        beside = group if many else held  # flags and configurations that were given beside one server's log
        settings = {name: value for each in beside for name, value in each.settings.items()}
        line, decay = causes_of(group, server, settings, level), decay_of(group, level)
        found.likely += [*line, *([decay] if decay is not None else [])]
        if server.findings or line:
            named |= {each.name for each in group}
            found.states.append("problem")
    for first, second in undated(held):
        figures = between(first, second)
        if figures is not None:
            pair = Held(kind="two pages of /metrics", name=f"{first.name} to {second.name}", figures=figures)
            _summary(found, pair)
            if words := figures_in_words(figures):
                found.state_certainly(f"Between {pair.name}: {words}", "page", pair.name, False)
            found.unknowable.append("rates: the pages have no moment; write `date -u` before each")
    return named


def add_watched(found: Conclusion, server: WatchedServer, level: Level, when: str = "") -> None:
    """What the watch says of a server; `when` it was so, where it was not all the time."""
    is_problem = server.state in ("stuck", "degraded", "overloaded")
    if server.state != "cannot tell":
        found.state_certainly(f"{_without_cause(server.headline)}{when}", level, server.name, is_problem)
        found.headline = found.headline or server.headline
    elif not line_facts(server):
        found.state_certainly(server.headline, level, server.name, is_problem=False)
        found.headline = found.headline or server.headline
    states: Mapping[str, State] = {"stuck": "stuck", "healthy": "no problem seen", "idle": "no problem seen"}
    found.states.append(states.get(server.state, "problem" if is_problem else "cannot tell"))
    causes = _of_findings(server.findings, level, server.name)
    found.likely += causes
    found.ranks |= {id(each): min(before.confidence for before in causes[: place + 1])
                    for place, each in enumerate(causes)}  # fmt: skip
    found.late_unknowable += [each for each in server.unknown if level != "log" or each != NO_OBJECTIVE]
    found.nexts.append((0.5 + is_problem, WATCH.replace("http://SERVER:8000", server.url or "http://SERVER:8000")))


def _answer(found: Conclusion, seen: list[Seen], unread: list[str], is_summary: bool) -> Triage:
    likely = sorted(found.likely, key=lambda each: -found.ranks.get(id(each), each.confidence))
    order: tuple[State, ...] = ("stuck", "problem", "no problem seen", "cannot tell")
    state = min(found.states, key=order.index, default="cannot tell")
    problems = [each for each in found.certain if each.is_problem]
    certain = [*problems, *(each for each in found.certain if not each.is_problem)]
    if likely and likely[0].confidence >= LEAST:
        headline = f"{likely[0].cause} (confidence {likely[0].confidence:.0%})"
    elif problems:
        headline = f"{problems[0].sentence}; {'its cause is unsure' if likely else 'this evidence names no cause'}"
    elif state == "no problem seen" or found.headline:
        headline = found.headline or next((each.sentence for each in certain), "no problem is seen")
    elif is_summary or not found.unknowable:
        headline = "no problem is seen in these figures; whether they are good depends on objectives"
    else:
        headline = f"not shown: {found.unknowable[0]}"
    open_ones = list(dict.fromkeys([*found.unknowable, *found.late_unknowable]))
    is_of_server = any("log" in each.kind or "/metrics" in each.kind for each in seen)
    nexts = sorted(found.nexts, key=lambda each: -each[0])
    return Triage(
        state=state, headline=headline, seen=seen, certain=certain, likely=likely,
        unknowable=open_ones, unread=unread, next=nexts[0][1] if nexts else WATCH if is_of_server else LOG,
    )  # fmt: skip


def _source(held: Held) -> str:
    label = held.figures.label if held.figures is not None else ""
    return f"{held.name} ({label})" if label else held.name


def _seen_live(server: WatchedServer) -> Seen:
    shows = f"{server.scrapes} scrapes over {server.window_s:.0f} s"
    return Seen(name=server.name, kind=f"page of {server.title}", label="", shows=shows)


def _of_server(command: str, held: Sequence[Held]) -> str:
    """With the port and the process of the engine, where the evidence states one."""
    ports = {str(each.settings["port"]) for each in held if "port" in each.settings}
    pids = {each.engine_pid for each in held if each.engine_pid is not None}
    command = command.replace("SERVER:8000", f"SERVER:{ports.pop()}") if len(ports) == 1 else command
    return command.replace("--pid PID", f"--pid {pids.pop()}") if len(pids) == 1 else command
