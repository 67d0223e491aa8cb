"""Steps of sizes that a run never had, from the normal speed of its model: what other runs and calibrations took.

Other runs of the same model, device and settings stand in `speed_reference` of `run.json`. Each knows how the time of a
step grows with its size. The run itself knows how much slower than that it was, so each entry is scaled to the run's
own steps, prompts and decodes apart. Where entries disagree about a size, that is the error to expect there. An
entry tells only of sizes that its own run had: entries that extrapolate alike agree, and may all be wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sojourn.metrics.compute.cost_model import ModelShape, StepWork, pairs_and_reads, shape_from
from sojourn.metrics.compute.speed_facts import stored_entries
from sojourn.metrics.compute.speed_reference import SpeedEntry, settings_of, step_features
from sojourn.metrics.compute.step_time import FAR_BEYOND, FEWEST_OF_A_SIZE, features, reached
from sojourn.metrics.run.directory import engine_settings
from sojourn.metrics.statistics.relative_fit import fitted
from sojourn.metrics.steps import Steps, rows_of
from sojourn.replay.step_fit import StepColumns

SAMPLED_STEPS = 1_500  # of the run, evenly: a slowdown is known well enough from them
FEWEST_STEPS = 8  # of a phase
DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # sequences
PROMPTS = (16, 48, 128, 256, 512, 1024, 2048)  # tokens of one chunk
BESIDE = (0, 4, 16)  # decodes beside a chunk
CONTEXTS = (0.5, 2.0)  # of the run's own median
HOST = (("receive",), ("schedule", "prepare", "launch"), ("commit",), ("publish",))  # as StepColumns.host_stages
FEWEST_ENTRIES = 3  # fewer do not show how much entries differ
NEAR = 1.5  # times, or a part: steps within it tell of a size
NORMAL_MAD = 1.4826  # standard deviations of a normal distribution in its median absolute deviation


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """Steps that the run never had, with the time that each would have taken in it."""

    steps: StepColumns | None  # None where no entry tells of such a size
    tells_beyond: bool  # whether some of them are larger than those of the run
    entries: int
    error: float | None  # relative standard deviation of the times of larger ones between entries; None: too few tell
    speed_spread: (
        float | None
    )  # standard deviation of the run's own steps: how much runs of this machine differ in speed


class _Size(NamedTuple):
    decodes: int
    context: int  # tokens before the new one, of each decode
    chunk: int  # tokens of the one chunk; 0: none
    past: int  # tokens before it


def known_sizes(meta: Mapping[str, Any], steps: pd.DataFrame, columns: StepColumns) -> KnownSizes | None:
    """None where no entry has the settings of the run, or the run does not say what they were."""
    shape = shape_from(meta)
    if shape is None:
        return None
    own = settings_of(meta, engine_settings(dict(meta)))
    entries = [entry for entry in stored_entries(meta) if entry.settings == own]
    sizes = list(_sizes(columns))
    if not entries or not sizes:
        return None
    some = np.unique(np.linspace(0, len(steps) - 1, SAMPLED_STEPS).astype(int))
    batch = Steps(rows_of(steps.iloc[some]))
    normal = _times(entries, step_features(shape, batch))
    device = np.maximum(batch["device_ns"] - np.maximum(batch["sampling_ns"], 0), 1).astype(float)
    prompts = batch.summed((batch.new_tokens > 1).astype(int)) > 0
    told = _times(entries, np.concatenate([_features(shape, size, columns) for size in sizes]))
    told[~np.array([[_tells(entry, size) for size in sizes] for entry in entries])] = np.nan
    has_chunk = np.array([size.chunk > 0 for size in sizes])
    for guesses, usual in zip(told, normal, strict=True):
        slowdowns = _slowdowns(device, usual, prompts)
        guesses *= np.where(has_chunk, slowdowns[1], slowdowns[0])
    known = ~np.isnan(told).all(axis=0)
    speed_spread = _speed_spread(normal) if len(entries) >= FEWEST_ENTRIES else None
    if not known.any():
        return KnownSizes(None, tells_beyond=False, entries=len(entries), error=None, speed_spread=speed_spread)
    told = told[:, known]
    sampling = fitted(np.stack([np.ones(len(columns)), columns.rows], axis=1), columns.sampling_ns)
    usable = [size for size, is_known in zip(sizes, known, strict=True) if is_known]
    most_decodes, largest = reached(columns.decodes), reached(columns.tokens)
    is_larger = np.array([s.decodes > most_decodes or s.decodes + s.chunk > largest for s in usable])
    times = np.nanmedian(told, axis=0) + [sampling @ (1.0, _rows(size)) for size in usable]
    return KnownSizes(
        steps=_columns(usable, times, _host_times(entries, usable, columns), columns),
        tells_beyond=bool(is_larger.any()),
        entries=len(entries),
        error=_error(told[:, is_larger]),
        speed_spread=speed_spread,
    )


def _sizes(columns: StepColumns) -> Iterator[_Size]:
    """Sizes of which the run has no step."""
    single = columns.decodes > 0
    usual = float(np.median(columns.decode_pairs[single] / columns.decodes[single])) if single.any() else 256.0
    alone, mixed = (columns.tokens[columns.chunks == 0], columns.tokens[columns.chunks > 0])
    contexts = [max(1, round(usual * share)) for share in CONTEXTS]
    for decodes in DECODES:
        if _is_rare(decodes, alone):
            yield from (_Size(decodes, context, 0, 0) for context in contexts)
    for chunk in PROMPTS:
        for decodes in BESIDE:
            if _is_rare(chunk + decodes, mixed):
                yield from (_Size(decodes, contexts[0], chunk, past) for past in (0, round(usual)))


def _is_rare(tokens: int, seen: np.ndarray) -> bool:
    """Whether too few steps were near to a size to know it: beyond those of the run, or in a gap between them."""
    return np.count_nonzero((seen > tokens / NEAR) & (seen < tokens * NEAR)) < FEWEST_OF_A_SIZE


def _rows(size: _Size) -> int:
    return size.decodes + (size.chunk > 0)


def _features(shape: ModelShape, size: _Size, columns: StepColumns) -> np.ndarray:
    new, past = (np.array(each, dtype=np.int64) for each in ((1, size.chunk), (size.context, size.past)))
    pairs, reads = pairs_and_reads(shape, new, past)
    work = StepWork(
        tokens=size.decodes + size.chunk,
        decodes=size.decodes,
        decode_pairs=int(size.decodes * pairs[0]),
        chunks=int(size.chunk > 0),
        chunk_pairs=int(pairs[1]) if size.chunk else 0,
        kv_reads=int(size.decodes * reads[0]) + (int(reads[1]) if size.chunk else 0),
        logit_rows=_rows(size),
    )
    return features(work, eager=not columns.has_graphs or size.chunk > 0)[None]


def _host_times(entries: Sequence[SpeedEntry], sizes: Sequence[_Size], columns: StepColumns) -> list[np.ndarray]:
    """ns of each of HOST [sizes]: the run's own, times what the entries say of more sequences. 0 of a size with a
    prompt: what a prompt costs the host does not grow with its chunk."""
    own = columns.decodes + columns.chunks
    alone = columns.chunks == 0
    at, wanted = (float(np.median(own[alone])) if alone.any() else 1.0), np.array([size.decodes for size in sizes])
    found = []
    for stages, measured in zip(HOST, columns.host_stages(), strict=True):
        lines = [[entry.host[stage] for stage in stages] for entry in entries if all(s in entry.host for s in stages)]
        usual = float(np.median(measured[alone])) if alone.any() else 0.0
        growth = [
            sum(line.at(wanted) for line in of_entry) / max(sum(line.at(at) for line in of_entry), 1.0)
            for of_entry in lines
        ]
        ns = usual * np.median(growth, axis=0) if growth else np.zeros(len(sizes))
        found.append(np.where([size.chunk > 0 for size in sizes], 0.0, ns))
    return found


def _columns(
    sizes: Sequence[_Size], device_ns: np.ndarray, host_ns: Sequence[np.ndarray], columns: StepColumns
) -> StepColumns:
    decodes, context, chunk, past = np.array(sizes, dtype=float).T
    receive, before, after, publish = host_ns
    chunks = (chunk > 0).astype(float)
    nothing = np.zeros(len(sizes))
    return StepColumns(
        begin_ns=nothing, tokens=decodes + chunk, decodes=decodes, decode_pairs=decodes * (context + 1), chunks=chunks,
        chunk_pairs=chunk * past + chunk * (chunk + 1) / 2, rows=decodes + chunks,
        eager_prompts=chunks * columns.has_graphs, device_ns=np.asarray(device_ns), sampling_ns=nothing,
        receive_ns=receive, before_ns=before, after_ns=after, publish_ns=publish, has_graphs=columns.has_graphs,
    )  # fmt: skip


def _times(entries: Sequence[SpeedEntry], found: np.ndarray) -> np.ndarray:
    """ns [entries, steps] without the draws; NaN where an entry had too few steps of the kind."""
    coefficients = np.array([[np.nan if ns is None else ns for ns in entry.step_ns] for entry in entries], dtype=float)
    unknown = np.isnan(coefficients)
    guesses = np.nan_to_num(coefficients) @ found.T
    guesses[(unknown.astype(float) @ (found.T > 0)) > 0] = np.nan
    return guesses


def _tells(entry: SpeedEntry, size: _Size) -> bool:
    """Whether the run of the entry had such steps, or nearly. An entry of an older version does not say."""
    if entry.most_decodes is None or entry.largest_tokens is None:
        return True
    if size.decodes + size.chunk < (entry.fewest_tokens or 0.0) / FAR_BEYOND:
        return False
    is_alike = size.decodes <= FAR_BEYOND * entry.most_decodes
    return is_alike and size.decodes + size.chunk <= FAR_BEYOND * entry.largest_tokens


def _slowdowns(device: np.ndarray, normal: np.ndarray, prompts: np.ndarray) -> tuple[float, float]:
    """Of decodes and of prompts: the median over the larger half of the steps. A phase that the run lacks is as slow
    as the other."""
    found = []
    for phase in (~prompts, prompts):
        usable = phase & (normal > 0)
        if usable.sum() < FEWEST_STEPS:
            found.append(np.nan)
            continue
        larger = usable & (normal >= np.median(normal[usable]))
        found.append(float(np.median(device[larger] / normal[larger])))
    decodes, chunks = found
    return (chunks if np.isnan(decodes) else decodes), (decodes if np.isnan(chunks) else chunks)


def _error(times: np.ndarray) -> float | None:
    """[entries, sizes] → the median deviation of sizes that enough entries tell of: one alone agrees with itself."""
    enough = (~np.isnan(times)).sum(axis=0) >= FEWEST_ENTRIES
    return float(np.median(_deviations(times[:, enough]))) if enough.any() else None


def _deviations(times: np.ndarray) -> np.ndarray:
    """[entries, sizes] → [sizes]: relative deviation between the entries that know a size."""
    logarithms = np.log(np.maximum(times, 1.0))
    return NORMAL_MAD * np.nanmedian(np.abs(logarithms - np.nanmedian(logarithms, axis=0)), axis=0)


def _speed_spread(normal: np.ndarray) -> float | None:
    """Of what each entry takes for the same steps of the run: those that all of the entries know."""
    shared = ~np.isnan(normal).any(axis=0)
    if not shared.any():
        return None
    return float(_deviations(normal[:, shared].sum(axis=1, keepdims=True))[0])
