"""The step models on a public recording of an A100: .venv/bin/python -m bench.steps.public_steps FOLDER

FOLDER is a checkout of github.com/kunluninsight/LatencyPrism: vLLM 0.10.0 with a model of 70 billion parameters. Its
rows count the requests before a step, so that some are of steps with prompts, whose tokens are nowhere. A row is a
decode step where the next row of the job has the same batch and one output token more. The file stays where it is.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from sojourn.diagnosis.step_facts import fit
from sojourn.metrics.compute.cost_model import StepWork
from sojourn.metrics.compute.step_time import StepTimeModel, features
from sojourn.replay.step_fit import StepColumns, StepTimes

FILE = "Sentinel/Data/Processed/normal_vllm.csv"
LAYERS = 80
EMPTY_MS = 5.0  # a step of this model reads its weights for longer: a shorter row computed nothing


class Decodes(NamedTuple):
    """Steps of decodes alone: [steps] each."""

    batch: np.ndarray
    context: np.ndarray  # tokens, of all sequences
    ns: np.ndarray
    lengths: np.ndarray  # of prompts and outputs, as text

    def of(self, chosen: np.ndarray) -> "Decodes":
        return Decodes(*(values[chosen] for values in self))


Predict = Callable[[Decodes], np.ndarray]  # nanoseconds, NaN where the model says nothing


def decodes(folder: Path) -> tuple[Decodes, Decodes]:
    """The decode steps, and the rows that computed nothing."""
    rows = pd.read_csv(folder / FILE)
    after = rows.groupby("job_name").shift(-1)
    is_decode = (after.batch_size == rows.batch_size) & (after.avg_input_length == rows.avg_input_length)
    is_decode &= (after.avg_output_length - rows.avg_output_length - 1).abs() < 1e-6
    is_empty = rows.duration_us < 1e3 * EMPTY_MS
    found = Decodes(
        batch=rows.batch_size.to_numpy(dtype=np.int64),
        context=(rows.batch_size * (rows.avg_input_length + rows.avg_output_length)).to_numpy().round().astype(int),
        ns=rows.duration_us.to_numpy() * 1e3,
        lengths=rows.job_name.str.replace(r"_conc\d+", "", regex=True).to_numpy(),
    )
    return found.of((is_decode & ~is_empty).to_numpy()), found.of(is_empty.to_numpy())


def online(steps: Decodes) -> Predict:
    model = StepTimeModel()
    model.observe_all(_features(steps), steps.ns)
    coefficients = model.coefficients()

    def predict(others: Decodes) -> np.ndarray:
        found = _features(others)
        unknown = np.isnan(coefficients)
        return np.where(found[:, unknown].any(axis=1), np.nan, found @ np.nan_to_num(coefficients))

    return predict


def replay(steps: Decodes) -> Predict:
    times = StepTimes(_columns(steps))
    return lambda others: times.expected_ns(_columns(others))


def capacity(steps: Decodes) -> Predict:
    model = fit(steps.batch, steps.context, steps.ns)
    return lambda others: np.array([model.predict(*each) for each in zip(others.batch, others.context, strict=True)])


MODELS = {"online": online, "replay": replay, "capacity": capacity}


def _features(steps: Decodes) -> np.ndarray:
    none = np.zeros_like(steps.batch)
    pairs = LAYERS * steps.context
    return features(StepWork(steps.batch, steps.batch, pairs, none, none, pairs, steps.batch), eager=0.0)


def _columns(steps: Decodes) -> StepColumns:
    none, batch = np.zeros(len(steps.batch)), steps.batch.astype(float)
    return StepColumns(
        begin_ns=np.cumsum(steps.ns), tokens=batch, decodes=batch, decode_pairs=steps.context.astype(float),
        chunks=none, chunk_pairs=none, rows=batch, eager_prompts=none, device_ns=steps.ns, sampling_ns=none,
        receive_ns=none, before_ns=none, after_ns=none, publish_ns=none, has_graphs=True,
    )  # fmt: skip


def splits(steps: Decodes) -> Iterator[tuple[str, list[tuple[np.ndarray, np.ndarray]]]]:
    """Name, and masks of the steps to learn from and of those to predict."""
    yield "each pair of lengths left out", [(steps.lengths != each, steps.lengths == each)
                                            for each in np.unique(steps.lengths)]  # fmt: skip
    for most in (64, 32):
        yield f"batch ≤ {most} → larger", [(steps.batch <= most, steps.batch > most)]
    within = steps.batch <= 64
    for sizes in ((8, 64), (16, 64), (1, 8, 32, 64)):
        alone = np.isin(steps.batch, sizes)
        yield f"batches {', '.join(map(str, sizes))} → others ≤ 64", [(alone, within & ~alone)]
    some = np.arange(len(steps.batch)) % 100 == 0
    yield "1% of the steps → the rest", [(some, ~some)]


def row(name: str, model: str, measured: np.ndarray, predicted: np.ndarray, stated: str) -> str:
    known = ~np.isnan(predicted)
    if not known.any():
        return f"| {name} | {model} | predicts none | | | | {stated} |"
    errors = 100 * (predicted[known] / measured[known] - 1)
    size = np.abs(errors)
    share = "" if known.all() else f" ({100 * known.mean():.0f}% predicted)"
    return (
        f"| {name} | {model} | {np.median(size):.1f}{share} | {size.mean():.1f} | {np.quantile(size, 0.9):.1f} | "
        f"{errors.mean():+.1f} | {stated} |"
    )


def accuracy(steps: Decodes) -> Iterator[str]:
    yield "| learnt from → predicted | model | median error, % | mean | p90 | bias | the replay says |"
    yield "|---|---|---|---|---|---|---|"
    for name, parts in splits(steps):
        measured = np.concatenate([steps.ns[out] for _, out in parts])
        for model, make in MODELS.items():
            predicted = np.concatenate([make(steps.of(into))(steps.of(out)) for into, out in parts])
            stated = _stated(*(steps.of(chosen) for chosen in parts[0])) if model == "replay" else ""
            yield row(name, model, measured, predicted, stated)


def _stated(steps: Decodes, others: Decodes) -> str:
    """What the replay says of its own error, and how many of the predictions it marks as beyond the run."""
    times, columns = StepTimes(_columns(steps)), _columns(others)
    beyond = times.is_beyond(columns.tokens, columns.decodes)
    error = f"{100 * times.error:.1f}%" if np.isfinite(times.error) else "too few sizes to tell"
    return f"{error}, {100 * beyond.mean():.0f}% beyond"


def poison(steps: Decodes, empty: Decodes) -> Iterator[str]:
    """How far a few rows that computed nothing move what the models say of each batch size."""
    yield "| bad steps | model | largest change of a prediction, % |"
    yield "|---|---|---|"
    sizes = np.unique(steps.batch)
    asked = Decodes(sizes, 400 * sizes, np.zeros(len(sizes)), sizes.astype(str))
    usual = np.flatnonzero(steps.batch == 1)
    for model, make in MODELS.items():
        clean = make(steps)(asked)
        for count, name, ns in (
            (3, "3 of the file's own", empty.ns), (len(empty.ns), "all of the file's own", empty.ns),
            (3, "3 of 0 ms", np.zeros(3)), (3, "3 of a hundred times", 100 * steps.ns[usual[:3]]),
        ):  # fmt: skip
            places = usual[np.linspace(0, len(usual) - 1, count + 2).astype(int)[1:-1]]
            spoilt = steps.ns.copy()
            spoilt[places] = ns[:count]
            change = np.nanmax(np.abs(make(steps._replace(ns=spoilt))(asked) / clean - 1))
            yield f"| {name} | {model} | {100 * change:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"with {FILE}")
    steps, empty = decodes(parser.parse_args().folder)
    print(f"{len(steps.ns):,} decode steps, {len(empty.ns)} rows that computed nothing\n")
    for line in accuracy(steps):
        print(line, flush=True)
    print()
    for line in poison(steps, empty):
        print(line, flush=True)


if __name__ == "__main__":
    main()
