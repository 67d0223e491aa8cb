"""How fast a run was beside the normal speed of its model and device: its steps by phase, its host, its texts.

The reference is the one in `run.json` (see metrics/compute/speed_reference.py), else what this machine's store has. A
run without any is compared with its own fastest quarter: that shows a slow part, and never a slow whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd

from sojourn.metrics.compute.cost_model import shape_from
from sojourn.metrics.compute.speed_reference import (
    HOST_STAGES,
    LAYOUT,
    SPEED_SETTINGS,
    SpeedEntry,
    expected,
    expected_line,
    family_of,
    fit_entry,
    read_entries,
    recorded_entries,
    sampling_ns,
    settings_of,
    step_features,
)
from sojourn.metrics.compute.speed_run import identity_of
from sojourn.metrics.compute.step_costs import transfer_ns
from sojourn.metrics.run.directory import engine_settings
from sojourn.metrics.steps import Steps, rows_of

QUARTERS = 4
FEWEST_STEPS = 32  # of a part: a median of fewer is good to a fifth at best
ENOUGH_COVERED = 0.5  # of the device time must be in steps that the reference knows
NUMBERS = ("dtype", "weights", "kv_cache_dtype")  # formats: other ones are another model
FORMATS = ("weights", "kv_cache_dtype", "dtype")
TEXTS = {
    "encoding": "prompt_characters", "decoding": "server_output_tokens", "writing": "server_output_tokens",
}  # fmt: skip
DECODE_PAIRS = 3  # of step_time.features: pairs of a query and a key


@dataclass(frozen=True, slots=True)
class Pace:
    """Time that some work took, and what it takes at normal speed. Milliseconds, summed over the run."""

    took_ms: float
    normal_ms: float

    @property
    def slowdown(self) -> float:
        return self.took_ms / max(self.normal_ms, 1e-9)

    @property
    def lost_share(self) -> float:
        """Of the time it took, what normal speed would have spared, 0 to 1."""
        return max(0.0, 1.0 - self.normal_ms / max(self.took_ms, 1e-9))


@dataclass(frozen=True, slots=True)
class OtherSettings:
    """What other settings of the same computation would make of the same steps."""

    settings: dict[str, Any]  # that differ
    speedup: float  # of the device time: above 1 they are faster


@dataclass(frozen=True, slots=True)
class SpeedFacts:
    """A run against its reference. Paces are None where the reference or the run does not have the part."""

    source: Literal["reference", "own quarter"]
    entries: int  # behind the reference
    covered: float  # of the device time, in steps that the reference knows, 0 to 1
    device: Pace  # without the draws
    prompts: Pace | None  # steps with prompt tokens
    decodes: Pace | None  # the others
    quarters: list[float]  # slowdown of the device over each quarter of the steps
    worst_steps: tuple[int, int]  # first and last step of the slowest quarter
    with_context: float | None  # slowdown of decode steps with much context over that of as many rows with little
    sampling: Pace | None
    # Against a reference only.
    host: dict[str, Pace] = field(default_factory=dict)  # stage → its time
    encoding: Pace | None = None
    decoding: Pace | None = None
    writing: Pace | None = None
    others: list[OtherSettings] = field(default_factory=list)  # that compute the same, the fastest first
    formats: list[OtherSettings] = field(default_factory=list)  # of weights or of KV: that is another model


def speed_facts(meta: Mapping[str, Any], steps: pd.DataFrame, rows: pd.DataFrame) -> SpeedFacts | None:
    """`steps` and `rows` are those that were measured. None for a run without the records that it takes."""
    shape = shape_from(meta)
    if shape is None or not meta.get("core") or len(steps) < 2 * FEWEST_STEPS:
        return None
    kept = rows_of(steps)
    batch = Steps(kept)
    found, drawn = step_features(shape, batch), sampling_ns(batch)
    device = np.maximum(batch["device_ns"] - drawn - transfer_ns(batch), 0).astype(float)
    own = settings_of(meta, engine_settings(dict(meta)))
    stored = stored_entries(meta)
    same = [entry for entry in stored if entry.settings == own]
    rows_of_logits = batch["logit_rows"].astype(float)
    normal = expected(same, found, rows_of_logits) if same else None
    is_reference = True
    if normal is None or _covered(device, normal.device_ns) < ENOUGH_COVERED:
        fitted = [fit_entry(shape, part, name="own", identity=0, measured_at="", settings=own) for part in _parts(kept)]
        same, is_reference = [entry for entry in fitted if entry is not None], False
        normal = _fastest_quarter(same, found, rows_of_logits, device)
        if normal is None:
            return None
    known = ~np.isnan(normal.device_ns)
    prompts = batch.summed((batch.new_tokens > 1).astype(int)) > 0
    quarters = [_pace(device, normal.device_ns, part) for part in _masks(known)]
    slowdowns = [pace.slowdown if pace is not None else 1.0 for pace in quarters]
    numbers = batch["step"]
    worst = np.flatnonzero(_masks(known)[int(np.argmax(slowdowns))])
    alone = known & ~prompts
    with_context: float | None = None
    of_reference: dict[str, Any] = {}
    # Verified drafts make a step longer, and more context gives more of them: entries know steps without drafts.
    if not steps.drafted_tokens.fillna(0).any():
        slowdown = device[alone] / np.maximum(normal.device_ns[alone], 1.0)
        with_context = _with_context(slowdown, batch.sequences[alone], found[alone, DECODE_PAIRS])
    if is_reference:
        texts = {name: _text(same, rows, name, units) for name, units in TEXTS.items()}
        others = _other_settings(stored, own, normal.device_ns, found, rows_of_logits)
        of_reference = {"host": _host(same, kept, batch), **texts, **others}
    return SpeedFacts(
        source="reference" if is_reference else "own quarter",
        entries=len(same),
        covered=_covered(device, normal.device_ns),
        device=Pace(float(device[known].sum()) / 1e6, float(normal.device_ns[known].sum()) / 1e6),
        prompts=_pace(device, normal.device_ns, known & prompts),
        decodes=_pace(device, normal.device_ns, alone),
        quarters=slowdowns,
        worst_steps=(int(numbers[worst[0]]), int(numbers[worst[-1]])),
        with_context=with_context,
        sampling=_pace(drawn.astype(float), normal.sampling_ns, ~np.isnan(normal.sampling_ns)),
        **of_reference,
    )


def stored_entries(meta: Mapping[str, Any]) -> list[SpeedEntry]:
    """The reference entries of a run, without those of the run itself."""
    recorded = meta.get("speed_reference")
    if isinstance(recorded, Mapping):
        entries = recorded_entries(recorded)
    else:
        family = family_of(meta)
        entries = [] if family is None else read_entries(family)
    return [entry for entry in entries if entry.identity != identity_of(meta)]


def _fastest_quarter(entries: Sequence[SpeedEntry], found: np.ndarray, logits: np.ndarray, device: np.ndarray) -> Any:
    """What the quarter expects that is fastest over the whole run; a quarter that knows little is none. None where a
    quarter could not be fitted, or knows too little."""
    if len(entries) < QUARTERS:
        return None
    guesses = [expected([entry], found, logits) for entry in entries]
    known = [guess for guess in guesses if _covered(device, guess.device_ns) >= ENOUGH_COVERED] or guesses
    best = min(known, key=lambda guess: np.nansum(guess.device_ns) / max(device[~np.isnan(guess.device_ns)].sum(), 1.0))
    return best if _covered(device, best.device_ns) >= ENOUGH_COVERED else None


def _parts(kept: Sequence[Any]) -> list[Sequence[Any]]:
    edges = np.linspace(0, len(kept), QUARTERS + 1).astype(int)
    return [kept[begin:end] for begin, end in pairwise(edges)]


def _masks(known: np.ndarray) -> list[np.ndarray]:
    """The known steps of each quarter, as masks."""
    masks = []
    for part in np.array_split(np.flatnonzero(known), QUARTERS):
        mask = np.zeros(len(known), dtype=bool)
        mask[part] = True
        masks.append(mask)
    return masks


def _covered(device: np.ndarray, normal: np.ndarray) -> float:
    return float(device[~np.isnan(normal)].sum() / max(device.sum(), 1.0))


def _pace(took: np.ndarray, normal: np.ndarray, chosen: np.ndarray) -> Pace | None:
    if chosen.sum() < FEWEST_STEPS:
        return None
    return Pace(float(took[chosen].sum()) / 1e6, float(normal[chosen].sum()) / 1e6)


def _with_context(slowdown: np.ndarray, sequences: np.ndarray, pairs: np.ndarray) -> float | None:
    """The upper third by context against the lower third, among steps of as many sequences: a batch that grows has more
    context, too. Medians, and their mean by steps; None for too few."""
    ratios, counts = [], []
    for size in np.unique(sequences):
        same = sequences == size
        low, high = np.quantile(pairs[same], [1 / 3, 2 / 3])
        if same.sum() >= FEWEST_STEPS and high > low:
            ratios.append(np.median(slowdown[same & (pairs >= high)]) / np.median(slowdown[same & (pairs <= low)]))
            counts.append(same.sum())
    return float(np.average(ratios, weights=counts)) if counts else None


def _host(entries: Sequence[SpeedEntry], kept: Sequence[Any], batch: Steps) -> dict[str, Pace]:
    sequences, paces = batch.sequences.astype(float), {}
    for stage in HOST_STAGES:
        normal = expected_line([entry.host.get(stage) for entry in entries], sequences)
        if normal is not None:
            took = sum(getattr(record, f"stage_{stage}_ns") for record in kept)
            paces[stage] = Pace(float(took) / 1e6, float(normal.sum()) / 1e6)
    return paces


def _text(entries: Sequence[SpeedEntry], rows: pd.DataFrame, name: str, units: str) -> Pace | None:
    if f"{name}_ns" not in rows or units not in rows:
        return None
    known = rows[[f"{name}_ns", units]].dropna().astype("float64")
    known = known[known[units] > 0]
    normal = expected_line([getattr(entry, name) for entry in entries], known[units].to_numpy())
    if normal is None or not len(known):
        return None
    return Pace(float(known[f"{name}_ns"].sum()) / 1e6, float(normal.sum()) / 1e6)


def _beside(name: str, own: dict[str, Any]) -> tuple[str, ...]:
    """All settings of speed but a format. Matrices as the checkpoint has them follow the format of all numbers."""
    follow = name == "dtype" and own.get("weights") == own.get("dtype")
    return tuple(each for each in SPEED_SETTINGS if each != name and not (follow and each == "weights"))


def _other_settings(
    stored: Sequence[SpeedEntry], own: dict[str, Any], normal: np.ndarray, found: np.ndarray, logits: np.ndarray
) -> dict[str, list[OtherSettings]]:
    formats = [
        other
        for name in FORMATS
        for other in _others(stored, own, _beside(name, own), normal, found, logits)
        if name != "dtype" or other.settings.get("weights") == other.settings.get("dtype")
    ]
    return {"others": _others(stored, own, NUMBERS, normal, found, logits), "formats": formats}


def _others(
    stored: Sequence[SpeedEntry], own: dict[str, Any], same: Sequence[str], normal: np.ndarray, found: np.ndarray,
    logits: np.ndarray,
) -> list[OtherSettings]:  # fmt: skip
    """Settings of other entries that agree with the run's own in `same`."""
    groups: dict[tuple, list[SpeedEntry]] = {}
    for entry in stored:
        if entry.settings != own and all(entry.settings.get(name) == own.get(name) for name in (*same, *LAYOUT)):
            groups.setdefault(tuple(sorted(entry.settings.items(), key=str)), []).append(entry)
    ranked = []
    for settings, entries in groups.items():
        guess = expected(entries, found, logits).device_ns
        both = ~np.isnan(guess) & ~np.isnan(normal)
        if normal[both].sum() >= ENOUGH_COVERED * np.nansum(normal):
            different = {name: value for name, value in settings if own.get(name) != value}
            ranked.append(OtherSettings(different, float(normal[both].sum() / max(guess[both].sum(), 1.0))))
    return sorted(ranked, key=lambda other: -other.speedup)
