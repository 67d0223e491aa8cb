"""What differs between two pieces of evidence of one kind of server: its settings, its load, and its means.

Only what both state is compared, but for flags: one that a log's start does not list has its default. A latency counts
as changed from a fifth on, of at least so many requests, and where its interval leaves out 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from sojourn.interop.held.chance import bounds_of_means
from sojourn.interop.held.effects import EFFECTS, SMALLEST_DEFAULT
from sojourn.interop.held.held import Figure, Held, Setting
from sojourn.interop.held.moved import Moved
from sojourn.metrics.errors import InputError

Verdict = Literal["worse", "better", "no clear change", "cannot tell"]
FEWEST, FEWEST_LOOKS = 30, 6  # requests behind a mean; moments behind that of a line
OTHER_LOAD = 1.1  # times as many requests, where nothing else says how they were sent
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")
JUDGED = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
THROUGHPUT = ("output_tokens_per_s", "requests_per_s")  # judged where the offered load is stated, and the same
OF_LOAD = ("prompt_tokens", "input_tokens", "output_tokens")
FIRST = (*LATENCIES, "hit_rate", "output_tokens_per_s", "prompt_tokens_per_s", "running", "waiting", "kv_use",
         *OF_LOAD, "requests", "preemptions")  # fmt: skip
OF_ONE_KIND = ("hit_rate",)  # a log's is the mean of a running rate, a page's a share of all tokens: never compared
STATISTICS = ("mean", "median", "total", "rate", "last")
DEFAULT = "default"
ALIASES = {  # names of one setting
    "model_path": "model", "model_tag": "model", "max_running_requests": "max_num_seqs", "tp_size":
    "tensor_parallel_size", "context_len": "max_model_len", "context_length": "max_model_len", "kv_cache_size_tokens":
    "kv_cache_tokens", "kv_cache_max_concurrency": "max_concurrency",
}  # fmt: skip
OF_ITS_PLACE = ("port", "host", "served_model_name", "tokenizer", "download_dir", "log_level", "uvicorn_log_level")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A setting or the version, before and after."""

    name: str
    before: Setting
    after: Setting


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Verdict
    headline: str
    settings: list[Change]
    figures: list[Moved]
    explained: list[str]  # sentences: which change explains which figures
    notes: list[str]


Bounds = Mapping[str, tuple[float, float]]  # of the ratio of a mean, by the name of the figure
NO_BOUNDS: Bounds = {}


def differences(before: Held, after: Held, bounds: Bounds = NO_BOUNDS) -> Differences:
    """Of two logs, two pages, or any two that name their settings and figures alike. Raises InputError for two that
    have nothing in common."""
    settings, figures, notes = list(_changes(before, after)), list(_moved(before, after, bounds)), []
    if not (settings or figures or _named(before.settings).keys() & _named(after.settings).keys()):
        raise InputError(
            f"{before.name} ({before.kind}) and {after.name} ({after.kind}) have no figure and no setting in common: "
            "give two of one kind, or ask `sojourn triage` what they say together"
        )
    if before.server != after.server:
        notes.append(f"the servers differ: {before.server or 'unknown'} before, {after.server or 'unknown'} after")
    notes += [*_of_load(figures), *_other_loads(before, after), *_definitions(figures)]
    explained = list(_explained(settings, figures))
    failed = _failed(before, after)
    verdict = _verdict(before, after, figures)
    if not (_of_load(figures) or _other_loads(before, after)):  # more load may fail more
        verdict = _with_failures(verdict, failed)
    clear = [each for each in (*_latencies(figures), *_judged(before, after, figures)) if each.is_clear]
    if failed is not None and failed.is_clear:
        figures, clear = [failed, *figures], [failed, *clear]
    return Differences(
        verdict=verdict, headline=_headline(before, after, settings, figures, list(dict.fromkeys(clear)), verdict),
        settings=settings, figures=figures, explained=explained, notes=notes,
    )  # fmt: skip


def _headline(
    before: Held, after: Held, settings: Sequence[Change], figures: Sequence[Moved], clear: list[Moved],
    verdict: Verdict,
) -> str:  # fmt: skip
    """The verdict, the figures that it rests on, and the changes that it fits. `clear`: what was judged and moved."""
    if verdict in ("worse", "better"):  # what speaks for it first
        clear = sorted(clear, key=lambda each: each.name != "failed" and _is_worse(each) != (verdict == "worse"))
    told = "; ".join(_words(each) for each in clear[:2]) or _without_latency(figures)
    told = "; ".join(filter(None, [told, _reason(before, after, figures) if verdict == "cannot tell" else ""]))
    causes = ", and ".join(
        f"{each.name}: {_said(each.before)} → {_said(each.after)}" for each in _first(settings, figures, verdict)
    )
    headline = f"{verdict}: {told}" if told else verdict
    return f"{headline}; {causes}" if causes else headline


def _latencies(figures: Sequence[Moved]) -> list[Moved]:
    return [each for each in figures if each.name in JUDGED]


def _changes(before: Held, after: Held) -> Iterator[Change]:
    if before.version and after.version and before.version != after.version:
        yield Change(name="version", before=before.version, after=after.version)
    a, b = _named(before.settings), _named(after.settings)
    lists_flags = before.kind == after.kind and "log" in before.kind and bool(a) and bool(b)
    for name in dict.fromkeys([*a, *b]):
        if name in OF_ITS_PLACE or not ((name in a and name in b) or lists_flags):
            continue
        old, new = a.get(name, DEFAULT), b.get(name, DEFAULT)
        if not _is_same(old, new):
            yield Change(name=name, before=old, after=new)


def _named(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, value in settings.items():
        found.setdefault(ALIASES.get(name, name), value)
    return found


def _is_same(old: Setting, new: Setting) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (old, new))
    if numbers:
        return abs(float(old) - float(new)) <= 0.01 * max(abs(float(old)), abs(float(new)))
    return str(old) == str(new)


def _moved(before: Held, after: Held, bounds: Bounds) -> Iterator[Moved]:
    if before.figures is None or after.figures is None:
        return
    bounds = bounds_of_means(before.figures, after.figures) | dict(bounds)
    theirs = {(each.name, each.statistic): each for each in after.figures.figures}
    both = [(each, theirs[each.name, each.statistic]) for each in before.figures.figures
            if (each.name, each.statistic) in theirs]  # fmt: skip
    for old, new in sorted(both, key=lambda pair: _place(pair[0])):
        again = old.statistic == "last" and (old.name, "mean") in theirs
        if old.name in OF_ONE_KIND and before.kind != after.kind and old.clock != new.clock:
            continue
        if old.unit == new.unit and old.statistic in STATISTICS and not again:
            yield Moved(name=old.name, statistic=old.statistic, unit=old.unit, before=old.value, after=new.value,
                        definitions=(old.clock, new.clock) if old.clock != new.clock else None,
                        bounds=bounds.get(old.name) if old.statistic in ("mean", "rate") else None)  # fmt: skip


def _place(figure: Figure) -> tuple[int, str]:
    return (FIRST.index(figure.name) if figure.name in FIRST else len(FIRST), figure.statistic)


def _of_load(figures: Sequence[Moved]) -> list[str]:
    differ = [each for each in figures if each.name in OF_LOAD and each.statistic == "mean" and each.is_clear]
    return [f"the loads differ: {_words(each)}; so latencies are not of the same work" for each in differ]


def _other_loads(before: Held, after: Held) -> list[str]:
    """What two summaries state of their loads, and differ in."""
    if before.figures is None or after.figures is None:
        return []
    a, b = before.figures.load, after.figures.load
    stated = [name for name in ("request_rate", "max_concurrency", "process") if name in a and name in b]
    found = [
        f"the loads differ: {name} {a[name]} → {b[name]}; so latencies are not of the same work"
        for name in stated if a[name] != b[name]
    ]  # fmt: skip
    is_paced = any(str(a[name]) not in ("inf", "None") for name in stated if name != "process")
    sent = _sent(before), _sent(after)
    if not found and not is_paced and min(sent) > 0 and max(sent) > OTHER_LOAD * min(sent):
        found.append(
            f"the loads differ: {sent[0]:,.0f} → {sent[1]:,.0f} requests, and no rate is stated that both kept"
        )
    return found


def _sent(held: Held) -> float:
    """Requests that a client sent; 0 where a server counted, or nobody did."""
    figures = [] if held.figures is None else held.figures.figures
    if not any(each.clock.startswith("client") for each in figures):
        return 0.0
    totals = {each.name: each.value for each in figures if each.statistic == "total"}
    return totals.get("requests") or totals.get("succeeded", 0.0) + totals.get("failed", 0.0)


def _definitions(figures: Sequence[Moved]) -> list[str]:
    """Once for each pair of definitions: where the two numbers are measured, and of which figures."""
    names: dict[tuple[str, str], list[str]] = {}
    for each in figures:
        if each.definitions is not None and each.name not in names.setdefault(each.definitions, []):
            names[each.definitions].append(each.name)
    return [
        f"{', '.join(of)} {'is' if len(of) == 1 else 'are'} defined otherwise: A {a}; B {b}"
        for (a, b), of in names.items()
    ]


def _of_two_sides(figures: Sequence[Moved]) -> bool:
    """Whether one was measured by the client and the other by the server: what lies between them is no change."""
    return any(len({clock.partition(":")[0] for clock in each.definitions}) > 1
               for each in figures if each.definitions is not None)  # fmt: skip


def _explained(settings: Sequence[Change], figures: Sequence[Moved]) -> Iterator[str]:
    for change in settings:
        effect = next((each for each in EFFECTS if each.setting == change.name), None)
        shown = _fitting(change, figures)
        if effect is not None and shown:
            yield (f"{change.name} {_said(change.before)} → {_said(change.after)}: {effect.words}. It fits "
                   f"{', '.join(_words(each) for each in shown[:3])}")  # fmt: skip
    hits = next((each for each in figures if each.name == "hit_rate" and each.statistic == "mean"), None)
    cache = {"enable_prefix_caching", "disable_radix_cache"} & {change.name for change in settings}
    if hits is not None and hits.is_clear and hits.after < hits.before and not cache:
        yield f"the prefix cache hits less, with no change of its setting: {_words(hits)}"


def _fitting(change: Change, figures: Sequence[Moved]) -> list[Moved]:
    """The figures that moved as the change is known to move them."""
    effect = next((each for each in EFFECTS if each.setting == change.name), None)
    if effect is None:
        return []
    lower = _is_lower(change)
    found = []
    for each in figures:
        sign = effect.figures.get(each.name)
        of_requests = _of_each_request(each, figures) if each.statistic == "total" else each
        if sign is None or each.statistic == "last" or (sign and lower is None):
            continue
        if of_requests is None or not each.is_clear or not of_requests.is_clear:
            continue
        rises = of_requests.after > of_requests.before
        if sign == 0 or rises == ((sign > 0) == bool(lower)):
            found.append(each)
    return found


def _of_each_request(total: Moved, figures: Sequence[Moved]) -> Moved | None:
    """A total as a share of the requests that ended: one side may be a longer time. None where they are not known."""
    ended = next((each for each in figures if each.name == "requests" and each.statistic == "total"), None)
    if ended is None or not ended.before or not ended.after:
        return None
    return msgspec.structs.replace(total, before=total.before / ended.before, after=total.after / ended.after,
                                   unit="share")  # fmt: skip


def _is_lower(change: Change) -> bool | None:
    """Whether the setting went down or off; None where that is unknown."""
    smallest = SMALLEST_DEFAULT.get(change.name)
    values = [each if each != DEFAULT or smallest is None else smallest for each in (change.before, change.after)]
    if all(isinstance(each, int | float) for each in values) and values[0] != values[1]:
        return float(values[1]) < float(values[0])
    return None


def _verdict(before: Held, after: Held, figures: Sequence[Moved]) -> Verdict:
    """By the latencies of enough requests, and what the same offered load got; of logs, which have none, by the
    line."""
    judged = _judged(before, after, figures)
    if _of_two_sides(judged) or _of_load(figures) or _other_loads(before, after):
        return "cannot tell"
    if judged and _requests(before) >= FEWEST and _requests(after) >= FEWEST:
        return _of_clear(judged, otherwise="no clear change")
    is_short = any(each.series and len({row["ns"] for row in each.series}) < FEWEST_LOOKS for each in (before, after))
    lines = [each for each in figures if each.name == "waiting" and each.statistic == "mean" and not is_short]
    return _of_clear([] if judged else lines, otherwise="cannot tell")


def _judged(before: Held, after: Held, figures: Sequence[Moved]) -> list[Moved]:
    latencies = [each for each in figures if each.name in JUDGED and each.statistic == "mean"]
    if before.figures is None or after.figures is None:
        return latencies
    a, b = before.figures.load, after.figures.load
    is_stated = any(name in a and a[name] == b.get(name) for name in ("request_rate", "max_concurrency"))
    throughput = [each for each in figures if each.name in THROUGHPUT and each.statistic == "rate"]
    return [*latencies, *throughput[:1]] if is_stated else latencies


def _is_worse(each: Moved) -> bool:
    """Than before."""
    return (each.after > each.before) != (each.name in THROUGHPUT)


def _with_failures(verdict: Verdict, failed: Moved | None) -> Verdict:
    """Latencies are of requests that did not fail: where more of them fail, it is no better for being quick."""
    if failed is None or not failed.is_clear:
        return verdict
    if failed.after > failed.before:
        return "worse"
    return "better" if verdict in ("better", "no clear change") else "cannot tell"


def _failed(before: Held, after: Held) -> Moved | None:
    """The shares of failed requests; None where a side does not count them, or has few."""
    shares = [_failed_share(each) for each in (before, after)]
    if None in shares:
        return None
    return Moved(name="failed", statistic="share", unit="share", before=shares[0] or 0.0, after=shares[1] or 0.0)


def _failed_share(held: Held) -> float | None:
    if held.figures is None:
        return None
    failed, ended = held.figures.value("failed", "total"), held.figures.value("succeeded", "total")
    made = held.figures.value("requests", "total") if ended is None else ended + (failed or 0.0)
    return failed / made if failed is not None and made is not None and made >= FEWEST else None


def _of_clear(figures: Sequence[Moved], otherwise: Verdict) -> Verdict:
    rises = {_is_worse(each) for each in figures if each.is_clear}
    chance = [each for each in figures if each.is_large and each.may_be_chance and _is_worse(each) not in rises]
    whole = [each for each in figures if each.name == "e2e_ms" and each.is_clear]
    if (chance or len(rises) > 1) and whole and _is_worse(whole[0]):
        return "worse"  # tokens that come quicker do not make up for the wait
    if chance:
        return "cannot tell"
    if not rises:
        return otherwise
    return "cannot tell" if len(rises) > 1 else "worse" if True in rises else "better"


def _reason(before: Held, after: Held, figures: Sequence[Moved]) -> str:
    """Why there is no verdict, in the order in which `_verdict` looks."""
    judged = _judged(before, after, figures)
    if _of_two_sides(judged):
        return "the client measured one and the server the other"
    if _of_load(figures) or _other_loads(before, after):
        return "the loads differ"
    if judged and min(_requests(before), _requests(after)) < FEWEST:
        return f"one has fewer than {FEWEST} requests, or does not count them"
    mixed = [each for each in judged if each.is_clear]
    if chance := _chance(judged):
        return chance
    if mixed:
        rose, fell = ([each.name.removesuffix("_ms") for each in mixed if (each.after > each.before) == rises]
                      for rises in (True, False))  # fmt: skip
        moved = [f"{' and '.join(names)} {word}" for names, word in ((fell, "fell"), (rose, "rose")) if names]
        return f"{', while '.join(moved)}: objectives decide"
    return "no latency is in both"


def _chance(judged: Sequence[Moved]) -> str:
    """What moved by much, and may have by chance alone; "" where clear changes contradict each other."""
    found = next((each for each in judged if each.is_large and each.may_be_chance), None)
    if found is None or len({_is_worse(each) for each in judged if each.is_clear}) > 1:
        return ""
    more = f"; about {found.longer:,.1f} times as many requests would show it" if found.longer else ""
    return f"{_words(found)} may be chance{more}"


def _requests(held: Held) -> float:
    if held.figures is None:
        return 0.0
    return held.figures.value("requests", "total") or held.figures.value("succeeded", "total") or 0.0


def _without_latency(figures: Sequence[Moved]) -> str:
    shown = [each for each in figures if each.name in ("waiting", "hit_rate", "kv_use") and each.is_clear
             and each.statistic == "mean"]  # fmt: skip
    return "; ".join(_words(each) for each in shown[:2])


def _first(settings: Sequence[Change], figures: Sequence[Moved], verdict: Verdict) -> list[Change]:
    """The changes that the verdict fits; without a verdict those that are known to matter."""
    if verdict in ("worse", "better"):
        times = {each.name for each in figures if each.name in (*LATENCIES, "waiting")
                 and (each.after > each.before) == (verdict == "worse")}  # fmt: skip
        return [each for each in settings if times & {moved.name for moved in _fitting(each, figures)}][:3]
    known = {each.setting for each in EFFECTS}
    return [each for each in settings if each.name in known][:2] if verdict == "cannot tell" else []


def _words(each: Moved) -> str:
    name = each.name.removesuffix("_ms") + (" median" if each.statistic == "median" else "")
    return f"{name} {_number(each.before, each.unit)} → {_number(each.after, each.unit)}"


def _number(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def _said(value: Setting) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
