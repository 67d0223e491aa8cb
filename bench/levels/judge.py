"""What each level of evidence says of a stored case, by the product's own mechanisms, and whether that is right."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.levels.cases import CASES, SLO, Case
from bench.levels.collect import CASE, CLIENT, LOG, PAGES, SUMMARY, UNREAD
from bench.watch.pages import read_pages
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.score.scoring import attainment
from sojourn.diagnosis.score.threshold_rules import threshold_verdict
from sojourn.diagnosis.symptoms import TOLERATED_MISSES
from sojourn.interop.sources.page import rows_of
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.watcher import Watched
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.triage.conclude import triage_given

JUDGEMENT = "judgement.json"
LEVELS = ("log", "summary", "page", "page, SLO", "page + client", "probe", "thresholds")
RIVAL = LEVELS[-1]
Right = Literal["right", "beside", "cannot tell", "wrong", "silent", "false alarm", "no evidence"]
# A state is a claim of its own where no cause is named, and a hung engine is one whatever is named.
CLAIMS = {"overloaded": "overload", "stuck": "engine_stall", "unreachable": "core_death"}
# What a triage names by its own words, as the cause that it is.
TRIAGE_KEYS = {"hang": "engine_stall", "preemption": "kv_pool", "saturation": "overload", "death": "core_death"}
ALARMS = ("problem", "degraded", *CLAIMS)


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict. `keys`: the causes that it names, the first at first."""

    state: str
    keys: tuple[str, ...]
    sentence: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`good`: the share of the client's requests that met their objectives; None without a client."""

    case: str
    level: str
    right: Right
    said: Said
    good: float | None = None


def judge(folders: Sequence[Path]) -> list[Verdict]:
    """The verdicts on all cases that the folders hold, each folder a run of them, also written into the last."""
    found = []
    for case, folder in places(folders):
        good = _good(folder / CLIENT)
        found += [verdict_on(case, level, SAYS[level](folder), good) for level in LEVELS]
    (folders[-1] / JUDGEMENT).write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    return found


def places(folders: Sequence[Path]) -> list[tuple[Case, Path]]:
    """Each run of each case, and where its evidence lies."""
    return [(case, folder / case.name) for case in CASES for folder in folders
            if (folder / case.name / CASE).exists()]  # fmt: skip


def read_judgement(folder: Path) -> list[Verdict]:
    return msgspec.convert(json.loads((folder / JUDGEMENT).read_text(encoding="utf-8")), list[Verdict])


def _good(client: Path) -> float | None:
    return attainment(RunDirectory.open(client)) if (client / "run.json").exists() else None


def counts(case: Case, good: float | None) -> bool:
    """Whether the client's own records agree with the plan: a fault hurt, and a control was not disturbed. The machine
    decides that, and no verdict."""
    if good is None:
        return True
    return (good >= 1 - TOLERATED_MISSES) == case.is_control


def verdict_on(case: Case, level: str, said: Said | None, good: float | None = None) -> Verdict:
    """No cause is an honest "cannot tell"; for a control any cause, and any alarm, is a false one."""
    if said is None:
        return Verdict(case.name, level, "no evidence", Said("", (), ""), good)
    if case.is_control:
        right: Right = "false alarm" if said.keys or said.state in ALARMS else "silent"
    elif not said.keys:
        right = "cannot tell"
    elif said.keys[0] in case.keys:
        right = "right"
    else:
        right = "beside" if set(said.keys) & set(case.keys) else "wrong"
    return Verdict(case.name, level, right, said, good)


def _by_log(folder: Path) -> Said | None:
    return _triage(files=[str(folder / LOG)])


def _by_summary(folder: Path) -> Said | None:
    """The result file of a benchmark without its requests: figures alone, as most people keep it."""
    path = folder / CLIENT / SUMMARY
    if not path.exists():
        return None
    figures = json.loads(path.read_text(encoding="utf-8"))
    summary = {name: value for name, value in figures.items() if not isinstance(value, list | dict)}
    return _triage(texts={"summary.json": json.dumps(summary)})


def _triage(**given: Any) -> Said:
    try:
        found = triage_given(**given)
    except InputError as error:
        return Said("cannot tell", (), str(error))
    keys = tuple(TRIAGE_KEYS.get(each.key, each.key) for each in found.likely)
    return _claims(found.state, keys, found.headline)


def _claims(state: str, keys: tuple[str, ...], sentence: str) -> Said:
    claim = CLAIMS.get(state)
    if claim is not None and (not keys or state == "stuck"):
        keys = (claim, *keys)
    return Said(state, keys, sentence)


def _by_page(objectives: Mapping[str, float]) -> Callable[[Path], Said]:
    """All that a watch named while the load ran. One wrong headline makes it wrong; the last one with a cause is what
    it said."""

    def read(folder: Path) -> Said:
        moments = json.loads((folder / CASE).read_text(encoding="utf-8"))
        seen = [each for ns, each in watched_over(folder, objectives) if moments["load_ns"] <= ns]
        named = [each for each in seen if each.keys]
        firsts = {each.keys[0]: each for each in named}
        if not firsts:
            return next((each for each in reversed(seen) if each.state in ALARMS), seen[-1] if seen else _NOTHING)
        last = named[-1]
        others = tuple(key for key in firsts if key not in last.keys)
        return Said(last.state, (*last.keys, *others), last.sentence)

    return read


def watched_over(folder: Path, objectives: Mapping[str, float]) -> list[tuple[int, Said]]:
    """When the watch said what, over all pages of a case and the moments without one."""
    pages = [(ns, took_s, body) for ns, took_s, body in read_pages(folder / PAGES)]
    unread = json.loads((folder / UNREAD).read_text(encoding="utf-8")) if (folder / UNREAD).exists() else []
    watched = Watched(Observer("", folder.name, objectives))
    found = []
    for ns, took_s, body, why in sorted([*((*page, "") for page in pages),
                                         *((each["ns"], 0.0, b"", each["error"]) for each in unread)]):  # fmt: skip
        if why:
            watched.observer.add_failure(ns, why)
        else:
            watched.observer.add(ns, rows_of(body, ns, took_s))
        if list(watched.judge(ns)):
            shown = watched.shown
            keys = tuple(each.key for each in shown.findings if each.role == "cause")
            stood = ("engine_stall",) if watched.observer.has_stall and shown.state == "degraded" and not keys else ()
            found.append((ns, _claims(shown.state, keys or stood, shown.headline)))
    return found


def _by_page_and_client(folder: Path) -> Said | None:
    """The diagnosis of the client's run with the pages; where it names no cause, what the watch says of them."""
    found = _of_run("metrics")(folder)
    if found is None or found.keys or found.state == "healthy":
        return found
    watched = _by_page(SLO)(folder)
    return watched if watched.keys else found


def _of_run(level: str) -> Callable[[Path], Said | None]:
    """The diagnosis of the client's run with so much evidence."""

    def read(folder: Path) -> Said | None:
        if not (folder / CLIENT / "run.json").exists():
            return None
        found = diagnose(RunDirectory.open(folder / CLIENT), level=level)
        keys = tuple(each.key for each in found.findings if each.role == "cause")
        return _claims(found.state, keys, found.headline)

    return read


def _by_thresholds(folder: Path) -> Said | None:
    if not (folder / CLIENT / "run.json").exists():
        return None
    found = threshold_verdict(RunDirectory.open(folder / CLIENT))
    return Said(found.state, tuple(each.key for each in found.causes), found.headline)


_NOTHING = Said("cannot tell", (), "nothing was said")
SAYS: Mapping[str, Callable[[Path], Said | None]] = dict(zip(LEVELS, (
    _by_log, _by_summary, _by_page({}), _by_page(SLO), _by_page_and_client, _of_run("all"), _by_thresholds,
), strict=True))  # fmt: skip
