"""The normal speed of a model on a device: what steps and stages took in earlier runs, and in calibrations.

Nothing within one run tells whether all of it was slow. So each run leaves an entry, of our own engine or of one with a
probe. It says how the time of its steps follows from what they held, and what the host's stages, the draws and the
texts cost. A later run of the same model, device and build is compared with the entries on its own composition. An
entry may be of a slow run, so the reference is the fast end of what was seen, not its mean. `sojourn calibrate device
--model` makes an entry on purpose.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.step_costs import batch_work, transfer_ns
from sojourn.metrics.compute.step_costs import step_features as features_of
from sojourn.metrics.compute.step_time import NUM_FEATURES, StepTimeModel, reached, smallest
from sojourn.metrics.machine.store import changing, store, store_path
from sojourn.metrics.records import STAGES
from sojourn.metrics.steps import Steps

# The first quartile of the entries: neither a minority of slow runs nor one lucky entry becomes the norm.
FAST_END = 25
MOST_ENTRIES = 12  # of one group of settings; the oldest go first
# Settings that decide how fast the same arithmetic is. Entries of other settings tell what these cost.
SPEED_SETTINGS = ("threads", "dtype", "weights", "attention_backend", "fused_operations", "kv_cache_dtype", "graphs",
                  "overlap")  # fmt: skip
LAYOUT = ("tensor_parallel", "pipeline_parallel", "expert_parallel")  # settings of a group of ranks that count, too
HOST_STAGES = tuple(stage for stage in STAGES if stage not in ("wait", "sample"))


class Line(msgspec.Struct, frozen=True):
    """A cost: so much once, and so much for each unit. Nanoseconds."""

    once_ns: float
    unit_ns: float

    def at(self, units: np.ndarray | float) -> np.ndarray | float:
        return self.once_ns + self.unit_ns * units


class SpeedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one run, or one calibration, showed."""

    name: str  # of the run; "calibration"
    identity: int  # a run is never its own reference: the time of its anchor
    measured_at: str  # ISO 8601, UTC
    settings: dict[str, Any]  # SPEED_SETTINGS, and of a group its LAYOUT
    step_ns: list[float | None]  # of each feature of step_time.features; None where too few steps had it
    steps: int
    largest_tokens: float | None = None  # that enough steps had; None where an older version wrote the entry
    most_decodes: float | None = None  # sequences with one new token in a step, likewise
    fewest_tokens: float | None = None  # that enough steps had, or fewer, likewise
    host: dict[str, Line] = {}  # stage → by sequences of the step
    sampling: Line | None = None  # by rows of logits
    encoding: Line | None = None  # by characters of the prompt
    decoding: Line | None = None  # by output tokens
    writing: Line | None = None  # by output tokens


class SpeedFile(msgspec.Struct, frozen=True):
    """All entries of one model on one device with one build."""

    family: str
    entries: list[SpeedEntry]


class Expected(NamedTuple):
    """What steps should take at normal speed [steps]; NaN where no entry knows such a step."""

    device_ns: np.ndarray  # without sampling
    sampling_ns: np.ndarray


def family_of(meta: Mapping[str, Any]) -> str | None:
    """What entries must have in common, as text: model, device and versions. None of a run that does not tell them."""
    shape, core = meta.get("model_shape"), meta.get("core")
    hardware = meta.get("server_hardware") or meta.get("hardware")
    if not (isinstance(shape, Mapping) and isinstance(core, Mapping) and isinstance(hardware, Mapping)):
        return None
    same = {name: value for name, value in shape.items() if name not in ("weight_bytes", "kv_bytes_per_token")}
    digest = hashlib.sha256(msgspec.json.encode(same, order="deterministic")).hexdigest()[:12]
    device = core["device"] if core["device"] != "cpu" else f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
    versions = meta.get("server_versions") or meta.get("versions") or {}
    engines = ("sojourn", "torch") if not meta.get("probe") else (str(meta["probe"]["engine"]),)
    built = ", ".join(f"{package} {versions.get(package)}" for package in engines)
    return f"model {digest} on {device} with {built}"


def settings_of(meta: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """SPEED_SETTINGS of a run, and the sizes of its group above 1: `engine` are its settings in force."""
    core = meta.get("core") or {}
    layout = {name: engine[name] for name in LAYOUT if (engine.get(name) or 1) > 1}
    return {name: core.get(name, engine.get(name)) for name in SPEED_SETTINGS} | layout


def of_one_process(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the layout of a group."""
    return {name: value for name, value in settings.items() if name not in LAYOUT}


def fit_entry(shape: ModelShape, records: Sequence[Any], **described: Any) -> SpeedEntry | None:
    """What the records of steps show (StepRecord, or rows of the table `steps`); None for too few with a time."""
    if len(records) < StepTimeModel.MIN_STEPS:
        return None
    steps, model = Steps(records), StepTimeModel()
    found, sampling = step_features(shape, steps), sampling_ns(steps)
    model.observe_all(found, steps["device_ns"] - sampling - transfer_ns(steps))
    if model.steps < StepTimeModel.MIN_STEPS:
        return None
    known = model.coefficients()
    sequences = steps.sequences.astype(float)
    return SpeedEntry(
        step_ns=[None if np.isnan(value) else float(value) for value in known],
        steps=len(records),
        largest_tokens=reached(steps.tokens),
        fewest_tokens=smallest(steps.tokens),
        most_decodes=reached(steps.summed((steps.new_tokens == 1).astype(np.int64))),
        host={stage: line(sequences, _stage(records, stage)) for stage in HOST_STAGES},
        sampling=line(steps["logit_rows"].astype(float), sampling.astype(float)) if sampling.any() else None,
        **described,
    )


def step_features(shape: ModelShape, steps: Steps) -> np.ndarray:
    """[steps, NUM_FEATURES] of step_time.features."""
    return features_of(batch_work(shape, steps), steps)


def sampling_ns(steps: Steps) -> np.ndarray:
    """[steps] of the device's time, what the draws took; 0 where a graph has them within itself."""
    return np.maximum(steps["sampling_ns"], 0)


def line(units: np.ndarray, ns: np.ndarray) -> Line:
    """Least squares with no coefficient below nought. The slowest twentieth counts as its bound: a stall teaches
    nothing. A time that is no number, or below nought, is no reading."""
    known = (ns >= 0) & np.isfinite(ns)
    units, ns = (units[known], ns[known]) if known.any() else (units, np.zeros(len(ns)))
    spent = np.minimum(ns, np.quantile(ns, 0.95))
    mean, spread = units.mean(), units - units.mean()
    slope = max(0.0, float((spread * spent).sum() / max((spread**2).sum(), 1e-9)))
    once = float(spent.mean() - slope * mean)
    if once < 0:
        return Line(0.0, float((units * spent).sum() / max((units**2).sum(), 1e-9)))
    return Line(once, slope)


def expected(entries: Sequence[SpeedEntry], found: np.ndarray, logit_rows: np.ndarray) -> Expected:
    """The fast end of what entries, at least one, expect of steps with such features [steps, NUM_FEATURES]."""
    coefficients = np.array([[np.nan if ns is None else ns for ns in entry.step_ns] for entry in entries], dtype=float)
    guesses = np.full((len(entries), len(found)), np.nan)
    for place, row in enumerate(coefficients):
        unknown = np.isnan(row)
        usable = ~found[:, unknown].any(axis=1)
        guesses[place, usable] = found[usable] @ np.nan_to_num(row)
    drawn = [entry.sampling.at(logit_rows) for entry in entries if entry.sampling is not None]
    return Expected(_fast_end(guesses), _fast_end(np.array(drawn)) if drawn else np.full(len(found), np.nan))


def expected_line(lines: Iterable[Line | None], units: np.ndarray) -> np.ndarray | None:
    """The fast end of what lines expect [units]; None without any."""
    known = [each.at(units) for each in lines if each is not None]
    return _fast_end(np.array(known)) if known else None


def read_entries(family: str, path: Path | None = None) -> list[SpeedEntry]:
    """The stored entries, the oldest first; [] where there are none, or none that can be read."""
    try:
        stored = msgspec.json.decode((path or store_path("speed", family)).read_bytes(), type=SpeedFile)
    except (OSError, msgspec.DecodeError):
        return []
    return _usable(stored.entries) if stored.family == family else []


def recorded_entries(recorded: Any) -> list[SpeedEntry]:
    """The entries in `speed_reference` of a `run.json`; [] where another version wrote them."""
    try:
        return _usable(msgspec.convert(recorded, SpeedFile).entries)
    except msgspec.ValidationError:
        return []


def add_entry(family: str, entry: SpeedEntry, path: Path | None = None) -> Path:
    """Stores one more entry. Of each group of settings the newest MOST_ENTRIES stay. Raises OSError."""
    path = path or store_path("speed", family)
    with changing(path):  # runs that end together, or a calibration beside one
        entries = [each for each in read_entries(family, path) if each.identity != entry.identity] + [entry]
        same = [each for each in entries if each.settings == entry.settings]
        dropped = {id(each) for each in same[:-MOST_ENTRIES]}
        left = [each for each in entries if id(each) not in dropped]
        return store(SpeedFile(family, left), path)


def _usable(entries: Iterable[SpeedEntry]) -> list[SpeedEntry]:
    """Those with the features of today's model of steps. One from before the last feature knows no adapters."""
    padded = (
        replace(entry, step_ns=[*entry.step_ns, None]) if len(entry.step_ns) == NUM_FEATURES - 1 else entry
        for entry in entries
    )
    return [entry for entry in padded if len(entry.step_ns) == NUM_FEATURES]


def _fast_end(guesses: np.ndarray) -> np.ndarray:
    """[entries, steps] → [steps]: the FAST_END percentile of those that are no NaN, between two of them a straight
    line. np.nanpercentile says the same, a thousand times slower."""
    ranked = np.sort(guesses, axis=0)  # NaN last
    counts = (~np.isnan(guesses)).sum(axis=0)
    place = FAST_END / 100 * np.maximum(counts - 1, 0)
    low = place.astype(int)
    high = np.minimum(low + 1, np.maximum(counts - 1, 0))
    columns = np.arange(guesses.shape[1])
    below, above = ranked[low, columns], ranked[high, columns]
    return below + (place - low) * (above - below)


def _stage(records: Sequence[Any], stage: str) -> np.ndarray:
    if hasattr(records[0], "stages"):
        place = STAGES.index(stage)
        return np.array([record.stages[place] for record in records], dtype=float)
    return np.array([getattr(record, f"stage_{stage}_ns") for record in records], dtype=float)
