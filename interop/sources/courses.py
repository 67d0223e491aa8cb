"""What the sums of a page hide: how its engines share the load, when the prefix cache began to hit less, when nothing
moved."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pandas as pd

from sojourn.interop.sources.pressure import GENERATED, KV_USE, RUNNING, WAITING
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import key, over_time

PREFIX, PREEMPTIONS = "sojourn_memory_prefix_tokens_total", "sojourn_memory_preemptions_total"
PROMPT_TOKENS, TTFT = "sojourn_token_prompt_tokens_total", "sojourn_request_ttft_seconds"
HIT, MISS = (key(PREFIX, (("result", result),)) for result in ("hit", "miss"))
FELL, STAYS = 0.3, 0.5  # of the looked-up tokens, by which the rate fell; and of the rate before, what is left at most
LEAST_PAUSE_S = 0.9  # one scrape per second without a token
FEWEST_SCRAPES, LEAST_PART = 5, 0.1  # with lookups on each side of a moment; of all that was looked up
CLEAR = 0.8  # of the scrapes of a side, that lie on its side of the middle: one unlucky prompt is no change


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One of the engines of a page, on average over the samples."""

    engine: str
    running: float
    waiting: float
    tokens: float  # generated

    @property
    def requests(self) -> float:
        return self.running + self.waiting


class HitChange(msgspec.Struct, frozen=True, kw_only=True):
    """The share of the looked-up prompt tokens that the prefix cache had, before and after it fell."""

    before: float
    after: float
    fell_ns: int
    ago_s: float  # before the last scrape
    kv_use: float | None = None  # the largest until the rate fell; None where the server shows none
    preemptions: float = 0.0  # until the rate fell


class Pauses(msgspec.Struct, frozen=True, kw_only=True):
    """Stretches in which no token was computed, and after which first tokens came of requests that had waited within
    them."""

    count: int
    longest_s: float
    seconds: float  # of all
    late_share: float  # of the times to first token of the window, the part of those after pauses


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapters requests wait for, over the samples in which some wait for one."""

    slots: int  # that may be in use at once
    names: int  # that were named by running or waiting requests
    samples: int
    blocked: float  # share of the samples in which all slots are taken, and an adapter waits that has none


class Courses(msgspec.Struct, frozen=True, kw_only=True):
    engines: list[EngineLoad] = []
    hit_change: HitChange | None = None
    adapters: AdapterUse | None = None  # None where no request waits for one
    deferred_share: float | None = None  # of those that wait, who wait for something else than room
    grammar_share: float | None = None  # of those that wait, who wait for a grammar; None where it may be another thing
    pauses: Pauses | None = None  # None where there are none
    generated_ns: int | None = None  # the last scrape before which a token was generated; None where none was


def names_followed(source: Source) -> set[str]:
    """The counters of which `courses_of` needs the growth between scrapes."""
    families = (PREFIX, GENERATED, PREEMPTIONS, PROMPT_TOKENS)
    return set().union(*(names_of_family(source, family) for family in families), *_of_firsts(source))


def names_of_family(source: Source, family: str) -> set[str]:
    items = [item for item in source.translations if item.ours == family]
    return {term.name for item in items for terms in item.theirs for term in terms}


def courses_of(source: Source, gauges: pd.DataFrame, grown: pd.DataFrame) -> Courses:
    """`gauges` as `scrapes.readings`, `grown` as `scrapes.growth_over_time` give them."""
    adapters, deferred = _adapters(source, gauges), _deferred_share(source, gauges)
    is_other = source.shares_grammar_line and adapters is not None
    return Courses(
        engines=_engines(source, gauges, grown), hit_change=_hit_change(source, gauges, grown),
        adapters=adapters, deferred_share=deferred, grammar_share=None if is_other else deferred,
        pauses=_pauses(source, grown), generated_ns=_generated_ns(source, grown),
    )  # fmt: skip


def gauges_followed(source: Source) -> set[str]:
    """Gauges that no family of the catalogue holds."""
    line = source.grammar_line
    return {name for name in (source.adapters, line.name if line is not None else "") if name}


def _adapters(source: Source, gauges: pd.DataFrame) -> AdapterUse | None:
    """Each combination of adapters is a series of its own, and the one that changed last is that of the moment."""
    rows = gauges[gauges.name == source.adapters] if source.adapters else gauges[:0]
    if not len(rows):
        return None
    names: set[str] = set()
    slots, samples, blocked, last = 0, 0, 0, 0.0
    for _, group in rows.groupby("ns", sort=True):
        latest = group.loc[group.value.astype("float64").idxmax()]
        if float(latest.value) <= last:
            continue  # nothing was scheduled since the look before
        last = float(latest.value)
        running, waiting = (_listed(latest.labels.get(f"{state}_lora_adapters")) for state in ("running", "waiting"))
        slots = max(slots, int(latest.labels.get("max_lora") or 0))
        names |= running | waiting
        samples += bool(waiting)
        blocked += bool(waiting - running) and len(running) >= slots > 0
    return AdapterUse(slots=slots, names=len(names), samples=samples, blocked=blocked / samples) if samples else None


def _listed(text: str | None) -> set[str]:
    return {name.strip() for name in (text or "").split(",") if name.strip()}


def _deferred_share(source: Source, gauges: pd.DataFrame) -> float | None:
    if source.grammar_line is None:
        return None
    lines = gauges[gauges.name == source.grammar_line.name]
    chosen = [all(labels.get(name) == value for name, value in source.grammar_line.where) for labels in lines.labels]
    lines = lines[chosen]
    # A line that is told by its label stands beside those for other reasons; another one is a part of what waits.
    others = {source.grammar_line.name} if source.grammar_line.where else names_of_family(source, WAITING)
    whole = float(gauges[gauges.name.isin(others)].value.astype("float64").sum())
    return float(lines.value.astype("float64").sum()) / whole if len(lines) and whole > 0 else None


def _generated_ns(source: Source, grown: pd.DataFrame) -> int | None:
    tokens = grown[grown.name.isin(names_of_family(source, GENERATED)) & (grown.growth.astype("float64") > 0)]
    return int(tokens.ns.max()) if len(tokens) else None


def _of_firsts(source: Source) -> tuple[set[str], set[str]]:
    """Names of the seconds to first tokens, and of their number."""
    names = names_of_family(source, TTFT)
    return {f"{name}_sum" for name in names}, {f"{name}_count" for name in names}


def _pauses(source: Source, grown: pd.DataFrame) -> Pauses | None:
    """A first token that took longer than the time since the scrape before is of a request that came before it."""
    names = (names_of_family(source, GENERATED) | names_of_family(source, PROMPT_TOKENS), *_of_firsts(source))
    parts = [grown[grown.name.isin(each)].groupby("ns").growth.sum().astype("float64") for each in names]
    if not all(len(part) for part in parts):
        return None
    tokens, seconds, firsts = (part.reindex(parts[0].index, fill_value=0.0) for part in parts)
    ends = tokens.index.to_numpy()
    lasted = np.diff(ends, prepend=ends[0]) / 1e9
    still, lengths, late_s = 0.0, [], 0.0
    for step_s, moved, took_s, number in zip(lasted.tolist(), tokens, seconds, firsts, strict=True):
        if not moved:
            still += step_s
            continue
        if still >= LEAST_PAUSE_S and number and took_s / number > step_s:
            lengths.append(min(still, 2 * took_s / number))  # who comes at any moment waits half of it on average
            late_s += took_s
        still = 0.0
    if not lengths:
        return None
    share = late_s / float(seconds.sum())
    return Pauses(count=len(lengths), longest_s=max(lengths), seconds=sum(lengths), late_share=share)


def _engines(source: Source, gauges: pd.DataFrame, grown: pd.DataFrame) -> list[EngineLoad]:
    if not source.engine_label:
        return []
    shown = {name: _by_engine(source, gauges, name, "value") for name in (RUNNING, WAITING)}
    tokens = _by_engine(source, grown, GENERATED, "growth")
    samples = max(1, gauges.ns.nunique()) if len(gauges) else 1
    return [
        EngineLoad(engine=engine, running=running / samples, waiting=shown[WAITING].get(engine, 0.0) / samples,
                   tokens=tokens.get(engine, 0.0))
        for engine, running in sorted(shown[RUNNING].items()) if engine
    ]  # fmt: skip


def _by_engine(source: Source, rows: pd.DataFrame, family: str, column: str) -> dict[str, float]:
    """Engine → sum over the scrapes."""
    chosen = rows[rows.name.isin(names_of_family(source, family))]
    engines = [str(labels.get(source.engine_label, "")) for labels in chosen.labels]
    return chosen[column].astype("float64").groupby(engines).sum().to_dict() if len(chosen) else {}


def _hit_change(source: Source, gauges: pd.DataFrame, grown: pd.DataFrame) -> HitChange | None:
    followed = names_of_family(source, PREFIX) | names_of_family(source, PREEMPTIONS)
    counted = over_time(source, "counter", grown[grown.name.isin(followed)], "growth")
    hit, miss = (counted.get(name) for name in (HIT, MISS))
    if hit is None or miss is None:
        return None
    uses = gauges[gauges.name.isin(names_of_family(source, KV_USE))]
    lost = [course for name, course in counted.items() if name.split("{")[0] == PREEMPTIONS]
    return with_pressure(hit_change(hit, miss), over_time(source, "gauge", uses, "value").get(KV_USE), lost)


def with_pressure(
    change: HitChange | None, kv_use: pd.Series | None, preemptions: Sequence[pd.Series]
) -> HitChange | None:
    """The change with the pressure on the pool until then. What comes later may follow from the fall."""
    if change is None:
        return None
    until = kv_use.loc[: change.fell_ns] if kv_use is not None else pd.Series(dtype="float64")
    return msgspec.structs.replace(
        change, kv_use=float(until.max()) if len(until) else None,
        preemptions=float(sum(course.loc[: change.fell_ns].sum() for course in preemptions)),
    )  # fmt: skip


def hit_change(hit: pd.Series, miss: pd.Series) -> HitChange | None:
    """The fall that divides the lookups best into two stretches of one rate each; None where none is clear."""
    looked_up = (hit + miss).dropna()
    looked_up = looked_up[looked_up > 0]
    asked, own = looked_up.to_numpy("float64"), hit.reindex(looked_up.index).to_numpy("float64")
    if len(asked) < 2 * FEWEST_SCRAPES:
        return None
    places = np.arange(FEWEST_SCRAPES, len(asked) - FEWEST_SCRAPES + 1)
    whole, parts, hits = asked.sum(), np.cumsum(asked)[places - 1], np.cumsum(own)[places - 1]
    before, after = hits / parts, (own.sum() - hits) / (whole - parts)
    divided = parts * (whole - parts) * np.square(before - after) * (before > after)
    divided[np.minimum(parts, whole - parts) < LEAST_PART * whole] = 0.0
    best = int(divided.argmax())
    place, high, low = int(places[best]), float(before[best]), float(after[best])
    rates, middle = own / asked, (high + low) / 2
    clear = min((rates[:place] > middle).mean(), (rates[place:] < middle).mean())
    if not divided[best] or high - low < FELL or low > STAYS * high or clear < CLEAR:
        return None
    last_ns, fell_ns = int(max(hit.index.max(), miss.index.max())), int(looked_up.index[place])
    return HitChange(before=high, after=low, fell_ns=fell_ns, ago_s=(last_ns - fell_ns) / 1e9)
