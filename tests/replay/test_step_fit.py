"""The model of a turn: it finds coefficients that are known, and its noise keeps the time of the run."""

from dataclasses import replace

import numpy as np
import pytest

from sojourn.replay.noise import Noise
from sojourn.replay.step_fit import StepColumns, StepTimes


def columns(count: int = 600, *, stall_ns: float = 0.0, slow: slice = slice(0, 0), noise: float = 0.0) -> StepColumns:
    """Steps of 900 µs, 80 µs a row up to 16 and 20 µs above, 0.3 µs a pair of a decode; the host takes 200 µs."""
    rng = np.random.default_rng(1)
    decodes = rng.integers(1, 9, count).astype(float)
    chunks = (rng.random(count) < 0.2).astype(float)
    tokens = decodes + chunks * rng.integers(8, 400, count)
    pairs = decodes * rng.integers(50, 500, count)
    device = 900e3 + 80e3 * np.minimum(tokens, 16) + 20e3 * np.maximum(tokens - 16, 0) + 300 * pairs
    device *= np.exp(noise * rng.standard_normal(count))
    device[slow] *= 1.8
    device[count // 2] += stall_ns
    host = np.full(count, 50e3)
    return StepColumns(
        begin_ns=np.concatenate(([0.0], np.cumsum(device + 200e3)[:-1])), tokens=tokens, decodes=decodes,
        decode_pairs=pairs, chunks=chunks, chunk_pairs=np.zeros(count), rows=decodes,
        eager_prompts=np.zeros(count), device_ns=device, sampling_ns=np.full(count, 1e5), receive_ns=host,
        before_ns=host, after_ns=host, publish_ns=host,
    )  # fmt: skip


def replayed_ns(steps: StepColumns) -> np.ndarray:
    """The device's time of each step, drawn at its own moment."""
    times = StepTimes(steps)
    noise, found = Noise(steps.begin_ns, times), []
    for begin_ns, expected_ns in zip(steps.begin_ns, times.predicted_ns, strict=True):
        ratio, _, stall_ns = noise.at(begin_ns, expected_ns)
        found.append(expected_ns * ratio + stall_ns)
    return np.array(found)


def test_fit_finds_the_known_time_of_a_step_and_is_not_bent_by_a_stall():
    times = StepTimes(columns(stall_ns=800e6))
    for tokens, decodes, pairs, known_ns in ((4, 4, 400, 1.34e6), (12, 12, 0, 1.86e6), (300, 3, 0, 7.86e6)):
        found = times.device_ns(tokens, decodes, pairs, int(tokens > decodes), 0, decodes)
        assert found == pytest.approx(known_ns, rel=0.02)


def test_a_prompt_costs_the_host_once_however_many_chunks_it_has():
    steps = columns()
    ended = steps.chunks  # each prompt has one chunk in this run
    steps = replace(steps, rows=steps.decodes + ended, publish_ns=60e3 + 2e3 * (steps.decodes + ended) + 200e3 * ended)
    in_chunks = replace(steps, chunks=np.full(len(steps), 3.0), rows=steps.decodes)  # none of which is the last
    _, _, _, publish = StepTimes(steps).host
    expected_ns = 60e3 + 2e3 * (steps.decodes + 3)
    assert in_chunks.host_features() @ publish == pytest.approx(expected_ns, rel=0.03)


def test_a_larger_step_never_takes_less():
    times = StepTimes(columns(noise=0.2))
    found = [times.device_ns(tokens, tokens, 100 * tokens, 0, 0, tokens) for tokens in range(1, 300)]
    assert found == sorted(found)


def test_noise_keeps_the_time_of_the_run_and_a_stall_happens_once():
    steps = columns(stall_ns=300e6, noise=0.15)
    assert replayed_ns(steps).sum() == pytest.approx(steps.device_ns.sum(), rel=0.02)
    assert (replayed_ns(steps) > 250e6).sum() == 1


def test_a_part_of_the_run_that_was_slow_is_slow_in_the_replay():
    found = replayed_ns(columns(slow=slice(300, 450)))
    usual = StepTimes(columns()).predicted_ns
    assert (found / usual)[320:430].mean() == pytest.approx(1.8, rel=0.1)
    assert (found / usual)[:280].mean() == pytest.approx(1.0, rel=0.05)


def test_a_short_chunk_takes_what_as_many_decodes_take_where_the_run_had_long_chunks_only():
    """Long chunks take 400 µs beside their rows here, which short ones do not."""
    steps = columns()
    steps.tokens[:] = steps.decodes + steps.chunks * 300
    rows_ns = 80e3 * np.minimum(steps.tokens, 16) + 20e3 * np.maximum(steps.tokens - 16, 0)
    steps.device_ns[:] = 900e3 + rows_ns + 400e3 * steps.chunks
    found = StepTimes(steps).device_ns(6, 2, 0, 1, 0, 3)
    assert found == pytest.approx(900e3 + 80e3 * 6, rel=0.05)
