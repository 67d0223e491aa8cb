"""A profile burst tells what a step's time went to, changes no token, and leaves no trace in the engine."""

import inspect
import json
import random
import time
from itertools import pairwise

import pytest
import torch

from sojourn.engine.compute.profiler import TorchProfiler, on_monotonic
from sojourn.engine.messages import Profile
from sojourn.engine.profile_burst import ProfileBurst
from sojourn.interop.exported.perfetto import TraceRows, write_trace
from sojourn.metrics.compute.kernels import CLASSES, Burst, by_class, by_name
from sojourn.metrics.records.tables import row
from tests.engine.harness import hand_over, make_engine, submit

pytestmark = pytest.mark.compiler

FAMILIES = ("qwen3", "mixtral", "deepseek-v2", "mpt")  # joined; experts; latent attention; layer norms and a plain MLP


def profiled(folder, steps: int = 8, wish: Profile | None = None, change=lambda engine: None, **settings):
    """The engine after a load of prompts and decodes, its tokens, its records, and the burst that went on meanwhile."""
    engine, published = make_engine(folder, max_num_batched_tokens=64, **settings)
    change(engine)
    dice = random.Random(1)
    prompts = [[dice.randrange(3, 90) for _ in range(length)] for length in (4, 16, 70)]
    burst = ProfileBurst(wish or Profile(steps, 60_000), engine)
    hand_over(
        engine, [submit(f"r{i}", prompt, 12, temperature=0.7 * (i % 2), seed=i) for i, prompt in enumerate(prompts)]
    )
    answer = None
    while engine.has_work or answer is None:
        answer = answer or burst.advance()
        if engine.has_work:
            engine.receive([], engine.step())
    engine.flush()
    return engine, published, answer


def plain(folder, **settings):
    return profiled(folder, wish=Profile(1, 0), **settings)[1].tokens


@pytest.mark.parametrize(("family", "overlap"), [*((family, "off") for family in FAMILIES), ("qwen3", "on")])
def test_classes_sum_to_the_wall_time_and_name_what_a_model_does(family, overlap, checkpoints):
    engine, _, burst = profiled(checkpoints[family], overlap=overlap)
    assert burst.failure is None and [window.step for window in burst.windows] == list(range(8))
    classes = by_class(burst.records)
    assert sum(classes.values()) == burst.window_ns > 0
    for klass in ("attention", "gemm", "norm", "sampling", "rope_kv"):
        assert classes[klass] > 0, klass
    assert {record.klass for record in burst.records} <= set(CLASSES)
    # Each layer has one call of attention in every step, also where the prompt's latents are expanded.
    layers = len(engine.runner.eager.model.layers)
    attend = next(kernel for kernel in by_name(burst.records) if kernel.klass == "attention")
    assert attend.count == 8 * layers
    assert burst.clock_error_ns < 1_000_000


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_device_names_the_kernels_of_its_steps(graphs, checkpoints):
    for _ in range(2):  # a process may be profiled again
        _, _, burst = profiled(checkpoints["qwen3"], device="cuda", dtype="bfloat16", graphs=graphs, max_num_seqs=8)
        classes = by_class(burst.records)
        assert burst.failure is None and sum(classes.values()) == burst.window_ns > 0
        for klass in ("attention", "gemm", "norm", "sampling", "rope_kv"):
            assert classes[klass] > 0, klass
        assert any("attend_kernel" in kernel.name for kernel in by_name(burst.records))


def methods_of(engine) -> list[set[str]]:
    """What stands in place of a class's own methods."""
    runner = engine.runner
    owners = (runner, runner.eager.operations, runner.eager.attention, *runner.eager.model.modules())
    return [{name for name, value in vars(owner).items() if inspect.isroutine(value)} for owner in owners]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_burst_changes_no_token_and_leaves_nothing_behind(family, checkpoints):
    before = []
    engine, published, burst = profiled(checkpoints[family], change=lambda engine: before.extend(methods_of(engine)))
    assert burst.windows and published.tokens == plain(checkpoints[family])
    assert methods_of(engine) == before
    runner = engine.runner
    joined = runner.eager.model.joined(runner.eager.operations, runner.eager.attention, runner.eager.kv_cache)
    assert (joined is not None) == (family == "qwen3") and (joined is None or joined.watch is None)


def test_kernels_lie_within_their_steps_on_the_hosts_clock(checkpoints):
    _, published, burst = profiled(checkpoints["qwen3"])
    runs = list(burst.runs())
    first, last = burst.windows[0], burst.windows[-1]
    slack = burst.clock_error_ns + 1
    assert burst.dropped == 0 and all(run.begin_ns <= run.end_ns for run in runs)
    assert all(first.begin_ns - slack <= run.begin_ns and run.end_ns <= last.end_ns + slack for run in runs)
    steps = {record.step: record for record in published.records}
    for window in burst.windows:
        record = steps[window.step]
        assert record.begin_ns <= window.begin_ns <= window.forward_ns <= window.end_ns <= record.end_ns
        assert window.end_ns - window.begin_ns == record.device_ns


def test_a_trace_knows_from_the_records_alone_when_the_device_computed(checkpoints, tmp_path):
    _, published, burst = profiled(checkpoints["qwen3"])
    known = {f"step {window.step}": window.begin_ns for window in burst.windows}
    for first in (0, 3):  # whole, and from the middle of a run
        write_trace(tmp_path / "trace.json", TraceRows(steps=[row(step) for step in published.records[first:]]))
        trace = json.loads((tmp_path / "trace.json").read_text())
        origin = trace["otherData"]["origin_monotonic_ns"]
        drawn = {e["name"]: origin + e["ts"] * 1000 for e in trace["traceEvents"] if e.get("cat") == "device"}
        off = [drawn[name] - begin_ns for name, begin_ns in known.items() if name in drawn]
        assert len(off) == 8 - first
        assert max(off) - min(off) <= 2_000  # as far apart as the gaps say
        assert abs(off[0]) < 5_000_000  # when a step was read, the device had just ended


def test_the_profilers_clock_is_the_hosts_within_the_error_that_is_told():
    profiler, around = TorchProfiler(torch.device("cpu")), []
    profiler.start()
    for _ in range(50):
        begin_ns = time.monotonic_ns()
        torch.ones(3).exp()
        around.append((begin_ns, time.monotonic_ns()))
    profiler.stop()
    events = [event for event in profiler.events() if event is not None and event.name == "aten::exp"]
    offset = profiler.offset()
    for (begin_ns, end_ns), event in zip(around, on_monotonic(events, offset), strict=True):
        assert begin_ns - offset.error_ns <= event.begin_ns <= event.end_ns <= end_ns + offset.error_ns


def test_a_planted_delay_is_booked_to_its_class(checkpoints):
    """5 ms in each call of attention, of which a small model needs none."""

    def slow_attention(engine):
        attend = engine.runner.eager.attention.attend

        def late(*arguments):
            time.sleep(0.005)
            return attend(*arguments)

        engine.runner.eager.attention.attend = late

    engine, _, burst = profiled(checkpoints["mixtral"], change=slow_attention)
    classes, calls = by_class(burst.records), 8 * len(engine.runner.eager.model.layers)
    assert classes["attention"] >= calls * 5_000_000
    assert max(classes, key=classes.get) == "attention"


def test_a_pause_of_the_host_is_a_gap_between_steps(checkpoints):
    def slow_scheduler(engine):
        schedule = engine.scheduler.schedule

        def late():
            time.sleep(0.01)
            return schedule()

        engine.scheduler.schedule = late

    *_, burst = profiled(checkpoints["qwen3"], change=slow_scheduler)
    gaps_ns = [later.begin_ns - earlier.end_ns for earlier, later in pairwise(burst.windows)]
    assert len(gaps_ns) == 7 and min(gaps_ns) >= 10_000_000
    assert sum(gaps_ns) == sum(record.total_ns for record in burst.records if record.name == "between steps")


def test_without_work_a_burst_ends_at_its_deadline(checkpoints):
    engine, _ = make_engine(checkpoints["qwen3"])
    now = 0
    burst = ProfileBurst(Profile(5, 100), engine, lambda: now)
    assert burst.advance() is None
    now = 99_999_999
    assert burst.advance() is None
    now = 100_000_000
    answer = burst.advance()
    assert isinstance(answer, Burst) and answer.windows == answer.records == [] and answer.failure is None


def test_a_burst_ends_at_its_deadline_with_the_steps_it_has(checkpoints):
    now = 0

    def clock() -> int:
        nonlocal now
        now += 20_000_000
        return now

    engine, _ = make_engine(checkpoints["qwen3"])
    burst = ProfileBurst(Profile(1000, 400), engine, clock)
    hand_over(engine, [submit("r", [5, 6, 7], 60)])
    answer = None
    while answer is None:
        answer = burst.advance()
        if engine.has_work:
            engine.receive([], engine.step())
    assert 1 <= len(answer.windows) < 50
    assert sum(by_class(answer.records).values()) == answer.window_ns


def test_a_profiler_that_fails_is_told_and_ends_nothing(checkpoints, monkeypatch):
    def broken(self):
        raise RuntimeError("no counters here")

    monkeypatch.setattr("sojourn.engine.compute.profiler.TorchProfiler.start", broken)
    engine, published, burst = profiled(checkpoints["qwen3"])
    assert burst.failure == "RuntimeError: no counters here" and burst.windows == []
    assert all(len(tokens) == 12 for tokens in published.tokens.values())
    assert not {"launch", "collect"} & set(vars(engine.runner))


def test_the_profiler_needs_nothing_that_torch_2_11_lacks(monkeypatch):
    """torch binds `activity_type` from 2.12 on."""
    if hasattr(torch._C._autograd._KinetoEvent, "activity_type"):
        monkeypatch.delattr(torch._C._autograd._KinetoEvent, "activity_type")
    profiler = TorchProfiler(torch.device("cpu"))
    profiler.start()
    torch.ones(1000).exp()
    profiler.stop()
    names = [event.name for event in profiler.events() if event is not None]
    assert "aten::exp" in names and "sojourn::mark" not in names
    assert profiler.offset().error_ns >= 0
