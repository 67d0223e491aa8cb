"""The figures say what the records say, and label everything they draw."""

import colorsys
import re

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.compute.roofline import Ceilings, Gemm
from sojourn.metrics.compute.startup import PHASES, Startup
from sojourn.metrics.compute.utilisation import TokenNumbers
from sojourn.metrics.ledger import ACCOUNTS, COLOURS
from sojourn.metrics.records import KINDS
from sojourn.metrics.request.blame import UNEXPLAINED, blame_of, waited_ns, worst
from sojourn.metrics.request.goodput import goodput_by_tpot
from sojourn.metrics.request.objectives import OBJECTIVES
from sojourn.metrics.request.token_gaps import slowest_gaps
from sojourn.ui import theme
from sojourn.ui.figures import blame as blame_figures
from sojourn.ui.figures import compute, goodput, ledger, memory, server, startup, steps
from sojourn.ui.run_data import load
from sojourn.ui.tables.blame import blame, slowed_steps, waits_by_reason
from sojourn.ui.tables.compute import flops_by_part, kernel_times, points, token_sentences, tokens, utilisation
from sojourn.ui.tables.memory import block_events, hit_rates, miss_ratios, outcome_tokens, preemptions
from sojourn.ui.tables.request import binned, chosen, step_series, steps_of, tokens_by_kind
from sojourn.ui.text import number, percent
from tests.further import further

UNIT = re.compile(
    r"\((ms|s|%|W|MHz|tokens|MFLOPs|requests|of one core.*|cumulative.*|[^)]*log scale|% of sent.*)\)$|per second$"
    r"|per step$|KV blocks$|^output token$"
)
RUNS = ("chat", *further("tiny_kv", "foreign", "vllm"))
CEILINGS = Ceilings(
    device="simulated", threads=1, measured_at="", versions={}, read_bytes_per_s=2e9, copy_bytes_per_s=1e9, inner=1024,
    gemm=[Gemm("float32", 64, 5e10)],
)  # fmt: skip


def figures(run) -> dict:
    """Every figure of the app for one run."""
    objectives = run.meta["objectives"]
    verdict = run.diagnosis
    slowest = chosen(run.requests, "e2e_ms", 20)
    all_figures = {
        "throughput": goodput.throughput_against_tpot(
            goodput_by_tpot(run.requests, objectives), goodput.bounds(run.requests, objectives, "tpot_ms")
        ),
        "where": ledger.where_the_time_went(run.requests),
        "where_ttft": ledger.where_the_time_went(run.requests, "ttft"),
        "waterfall": ledger.waterfall(slowest),
        "waterfall_ttft": ledger.waterfall(slowest, "ttft"),
        "one_request": ledger.one_request(slowest.iloc[0], run.steps),
        "over_time": steps.over_time(run.steps, run.begin_ns),
        "expected": steps.expected_against_actual(run.steps, run.begin_ns),
        "stages": steps.stage_breakdown(run.steps),
        "outcomes": memory.prefix_outcomes(outcome_tokens(run.requests)),
        "hit_rates": memory.hit_rates(hit_rates(run.requests, run.begin_ns)),
        "miss_ratio": memory.miss_ratio_curve(*miss_ratios(run.requests)),
        "blocks": memory.blocks_over_time(run.steps, run.begin_ns, 16),
        "lives": memory.block_lives(block_events(run.steps), 64),
        "roofline": compute.roofline(points(run.steps), CEILINGS, "float32"),
        "utilisation": compute.utilisation(utilisation(run.steps, CEILINGS, "float32")),
        "tokens": compute.tokens_by_kind(tokens(run.requests, run.steps)),
        "flops_by_part": compute.flops_by_part(flops_by_part(run.steps)),
        "kernels": compute.kernels_by_class(kernel_times(run.kernels)),
        "machine": compute.machine(run.system, run.begin_ns),
        "attainment": goodput.attainment(verdict.goodput),
        "lifecycles": ledger.lifecycle_bar(verdict.lifecycle_share),
        "parts": server.parts_of_the_time(verdict),
        "server": server.over_time(run.server, run.begin_ns),
    }
    if run.book is not None:
        all_figures |= blamed(run)
    for latency in OBJECTIVES:
        bounds = goodput.bounds(run.requests, objectives, latency)
        all_figures[latency] = goodput.latency_distribution(run.requests, latency, bounds)
    return all_figures


def blamed(run) -> dict:
    """The figures of who delayed whom."""
    name = run.requests.nlargest(1, "e2e_ms").request_id.iloc[0]
    slowest = slowest_gaps(run.book, name, 3)
    stamps = run.book.requests.set_index("request_id").token_ns[name]
    return {
        "waits": blame_figures.waits_by_reason(waits_by_reason(run.requests)),
        "by_class": blame_figures.heat_map(blame(run.book, "klass"), "classes that waited", "classes"),
        "worst": blame_figures.heat_map(blame(run.book, "worst"), "requests that waited", "requests"),
        "offenders": blame_figures.offenders(blame_of(run.book, name), float(waited_ns(run.book).loc[name].sum())),
        "gap": blame_figures.gap(slowest[0]),
        "gap_lengths": blame_figures.gap_lengths(list(stamps), [gap.token for gap in slowest], 0),
    }


@pytest.fixture(scope="module", params=RUNS)
def all_figures(request) -> dict:
    return figures(request.getfixturevalue(request.param))


def test_every_trace_has_a_name_and_every_number_says_its_unit(all_figures):
    for name, fig in all_figures.items():
        assert all(trace.name for trace in fig.data), name
        assert all(trace.hovertemplate or trace.hoverinfo == "skip" for trace in fig.data), name
        for axis in [*fig.select_xaxes(), *fig.select_yaxes()]:
            if axis.visible is False or axis.showticklabels is False:
                continue
            assert axis.title.text, (name, axis.plotly_name)
            named = axis.type == "category" or (axis.ticktext is not None and axis.type != "log")
            if not named and axis.categoryorder is None and axis.autorange != "reversed":
                assert UNIT.search(axis.title.text), (name, axis.title.text)


def test_figure_without_data_says_why_in_a_sentence(foreign):
    all_figures = figures(foreign)
    for name in ("where", "over_time", "expected", "stages", "parts", "server"):
        assert not all_figures[name].data, name
        assert all_figures[name].layout.annotations[0].text.endswith("."), name
    assert [trace.name for trace in all_figures["waterfall"].data][:2] != []


def test_what_is_written_never_fills_more_blocks_than_are_active(chat):
    """Also in means over spans that hold steps of an idle pool, which writes nothing."""
    steps = chat.steps.assign(slots_written=15 * chat.steps.blocks_active)
    steps.loc[::2, ["slots_written", "blocks_active"]] = 0
    traces = {trace.name: trace for trace in memory.blocks_over_time(steps, chat.begin_ns, 16, bins=20).data}
    assert max(traces["active"].y) > 0
    assert (traces["slots written"].y <= traces["active"].y).all()


def test_waterfall_rows_are_as_long_as_the_latencies_and_in_their_order(chat):
    rows = chosen(chat.requests, "e2e_ms", 30)
    fig = ledger.waterfall(rows)
    lengths = np.zeros(len(rows))
    for trace in fig.data:
        if trace.type == "bar":
            lengths[np.array(trace.y)] += np.array(trace.x, dtype=float)
    np.testing.assert_allclose(lengths, rows.e2e_ms, rtol=1e-9, atol=0.0005 * len(ACCOUNTS))
    assert list(rows.e2e_ms) == sorted(rows.e2e_ms, reverse=True)
    assert list(fig.layout.yaxis.ticktext) == list(rows.request_id)


def test_shares_of_the_time_sum_to_all_of_it_and_do_not_depend_on_the_order_of_rows(chat):
    fig = ledger.where_the_time_went(chat.requests)
    totals = np.sum([np.array(trace.x, dtype=float) for trace in fig.data], axis=0)
    np.testing.assert_allclose(totals, 100, atol=0.05 * len(ACCOUNTS))  # shares below 0.05% are left out
    shuffled = ledger.where_the_time_went(chat.requests.sample(frac=1, random_state=3))
    for before, after in zip(fig.data, shuffled.data, strict=True):
        assert before.name == after.name
        np.testing.assert_allclose(np.array(before.x, dtype=float), np.array(after.x, dtype=float))


def test_distribution_crosses_the_objective_at_the_attainment_of_its_class(chat):
    requests = chat.requests[chat.requests.klass == "chat"]
    fig = goodput.latency_distribution(requests, "tpot_ms", {"chat": 25.0})
    curve, line = fig.data
    kept = next(group for group in chat.diagnosis.goodput if group.klass == "chat")
    within = np.array(curve.y)[np.array(curve.x) <= 25.0].max()
    assert requests.tpot_ms.notna().all() and (requests.status == "ok").all()
    assert within == pytest.approx(100 * kept.attainment_by_objective["tpot_ms"])
    assert set(line.x) == {25.0} and "25" in line.name


def test_attainment_bars_are_those_of_the_diagnosis(chat):
    fig = goodput.attainment(chat.diagnosis.goodput)
    whole = next(trace for trace in fig.data if trace.name == "all objectives")
    np.testing.assert_allclose(whole.x, [100 * group.attainment for group in chat.diagnosis.goodput])
    assert not whole.text and {trace.base[0] for trace in fig.data if trace.text} == {100}  # beside bars and intervals


def test_steps_of_a_request_hold_the_prompt_tokens_that_its_record_claims(chat, tiny_kv):
    for run in (chat, tiny_kv):
        for request in run.requests.head(10).itertuples():
            part = steps_of(run.steps, request.request_id)
            assert part.step.min() == request.first_step and part.step.max() == request.last_step
            assert (
                part[part.kind == "prefill"].new_tokens.sum()
                == request.server_prompt_tokens - request.server_cached_tokens
            )
            rebuilt = part[
                part.kind == "recompute"
            ].new_tokens.sum()  # each rebuilding step also computes one new token
            assert request.recomputed_tokens <= rebuilt <= request.recomputed_tokens + request.preemptions


def test_tokens_by_kind_lose_no_token(tiny_kv):
    by_kind = tokens_by_kind(tiny_kv.steps)
    assert list(by_kind.columns) == list(KINDS)
    assert by_kind.to_numpy().sum() == sum(sum(tokens) for tokens in tiny_kv.steps.new_tokens)
    assert by_kind.recompute.sum() > 0


def test_bins_keep_what_stands_and_show_idle_spans_as_empty(chat):
    series = step_series(chat.steps, chat.begin_ns)
    same, width = binned(series, bins=len(series))
    assert width == 0 and len(same) == len(series)
    late = series.assign(begin_s=series.begin_s.where(series.index < 50, series.begin_s + 1000))
    late = late.assign(end_s=late.begin_s + (series.end_s - series.begin_s))
    spans, width = binned(late, bins=100)
    idle = spans[(spans.at_s > late.begin_s[49] + width) & (spans.at_s < late.begin_s[50] - width)]
    assert len(idle) > 50
    assert not idle[[f"tokens_{kind}" for kind in KINDS]].to_numpy().any()
    blocks = spans[[name for name in spans.columns if name.startswith("blocks_")]].sum(axis=1)
    np.testing.assert_allclose(blocks, blocks.iloc[0])


def test_accounts_are_shades_of_their_lifecycle_and_all_differ():
    def hue(colour: str) -> float:
        return colorsys.rgb_to_hls(*(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)))[0]

    for info in ACCOUNTS:
        if info.lifecycle != "client":  # grey has no hue
            assert hue(theme.ACCOUNT_COLOURS[info.name]) == pytest.approx(hue(COLOURS[info.lifecycle]), abs=0.01)
    assert len(set(theme.ACCOUNT_COLOURS.values())) == len(theme.ACCOUNT_COLOURS)


def test_parts_of_a_foreign_servers_time_equal_the_diagnosis_and_sum_to_all(vllm):
    fig, share = server.parts_of_the_time(vllm.diagnosis), vllm.diagnosis.ledger_share
    shown = {trace.name: trace.x for trace in fig.data}
    assert {"queue", "prefill", "decode", "unaccounted"} <= set(shown)
    assert shown["queue"][0] == pytest.approx(100 * share["request.queue + memory.blocked"])
    np.testing.assert_allclose(np.sum(list(shown.values()), axis=0), 100, atol=0.2)


def test_foreign_server_over_time_has_a_point_a_scrape(vllm):
    fig = server.over_time(vllm.server, vllm.begin_ns)
    traces = {trace.name: trace for trace in fig.data}
    assert {"running", "waiting", "KV use", "preemptions", "prompt tokens", "output tokens"} <= set(traces)
    assert len(traces["waiting"].x) == vllm.diagnosis.server.scrapes
    assert max(traces["running"].y) == 2 and max(traces["waiting"].y) > 10


def test_heat_map_shows_the_waiting_of_the_ledger(chat):
    fig = blame_figures.heat_map(blame(chat.book, "klass"), "classes that waited", "classes")
    shown = np.sum(np.array(fig.data[0].z, dtype=float))
    left = blame(chat.book, "klass")[UNEXPLAINED].clip(upper=0).sum() / 1e9
    assert shown == pytest.approx(waited_ns(chat.book).to_numpy().sum() / 1e9 - left, rel=1e-9)


def test_simulated_server_and_the_blame_matrix_agree_on_who_waited(chat, tiny_kv):
    """Two statements of what waiting is that share no code: the matrix finds from the steps what the server booked."""
    for run in (chat, tiny_kv):
        waited = waited_ns(run.book).sum(axis=1)
        left = worst(run.book, 1)[UNEXPLAINED].abs()
        assert left.sum() < 0.01 * waited.sum()


def test_time_that_no_work_explains_is_said_beside_the_blame():
    steps = pd.DataFrame({"device_ns": [10.0] * 90 + [100.0] * 10, "predicted_ns": [10] * 100})
    assert f"{percent(0.474)} of the device's time is more than the work of 10 steps" in slowed_steps(steps)
    assert slowed_steps(steps.assign(device_ns=[10.0] * 99 + [40.0])) == ""  # 3%
    assert slowed_steps(steps.assign(predicted_ns=None)) == slowed_steps(steps[:0]) == ""


def test_steps_stay_below_the_ceilings_and_shares_are_theirs(chat):
    shown = points(chat.steps)
    table = utilisation(chat.steps, CEILINGS, "float32").set_index("phase")
    busy = table.loc["all, device busy"]
    assert busy.mfu == pytest.approx(chat.steps.flops.sum() / chat.steps.device_ns.sum() * 1e9 / 5e10)
    assert busy.mbu == pytest.approx(chat.steps.bytes.sum() / chat.steps.device_ns.sum() * 1e9 / 2e9)
    assert table.loc["all, wall time"].mfu <= busy.mfu
    np.testing.assert_allclose(shown.gflops / shown.gbytes, shown.intensity)
    assert max(busy.mfu, busy.mbu) <= busy.of_roofline + 1e-9


def test_bars_of_starts_are_as_long_as_the_starts():
    phases = {"process": 10**8, "imports": 3 * 10**9, "read_disk": 5 * 10**8}
    cold = Startup(begin_ns=0, end_ns=3_600_000_000, phases_ns=phases, read_bytes={"disk": 1 << 29})
    again = Startup(begin_ns=5, end_ns=500_000_005, phases_ns={"read_disk": 5 * 10**8}, read_bytes={})
    figure = startup.startups([cold, again])
    drawn = np.sum([trace.x for trace in figure.data], axis=0)
    assert drawn == pytest.approx([3.6, 0.5]) and {trace.name for trace in figure.data} == {
        "process", "imports", "read disk"
    }  # fmt: skip
    assert "1,074 MB/s" in figure.data[0].y[0] and len(set(startup.COLOURS)) == len(PHASES)
    assert startup.startups([]).layout.annotations


def test_run_without_gaps_shows_no_wall_time(chat):
    table = utilisation(chat.steps.assign(gap_ns=float("nan")), CEILINGS, "float32")
    assert "all, device busy" in table.phase.tolist() and "all, wall time" not in table.phase.tolist()


def test_further_choice_that_lost_its_blocks_shows_what_its_call_paid():
    steps = pd.DataFrame([dict(step=3, begin_ns=2e9, preempted_ids=["r#1"], preempted_for=["x"], preempted_tokens=[5])])
    requests = pd.DataFrame([dict(request_id="r", ledger_memory_preempted_ns=70e6, recomputed_tokens=9.0)])
    (shown,) = preemptions(steps, requests, 0.0).to_dict("records")
    assert shown["victim"] == "r#1" and shown["its blocks went to"] == "x"
    assert (shown["time without a place (ms)"], shown["tokens computed again"]) == (number(70.0), number(9.0))


def test_what_is_known_of_tokens_is_said_and_nothing_else():
    assert token_sentences(TokenNumbers(None, None, 0, None, None)) == ""
    assert token_sentences(TokenNumbers(None, None, 0, None, 3.456)) == "3.46 characters per token in outputs."
    said = token_sentences(TokenNumbers(1.25, 0.875, 1200, 4.0, 3.5))
    assert "4.00 characters per token in prompts, 3.50" in said and "over 1,200 sampled tokens" in said
    assert "1.25 nats" in said and "87.5% of the probability mass" in said


def test_a_run_too_large_for_the_blame_matrix_is_shown_without_it_and_says_why(runs, monkeypatch):
    monkeypatch.setattr("sojourn.metrics.request.offenders.MOST_ENTRIES", 100)
    run = load(runs / "chat")
    assert run.book is None and "for at most 100" in run.no_book
    assert not load(runs / "foreign").no_book.startswith(str(runs))


def test_dark_figure_changes_ink_and_paper_and_keeps_the_data(chat):
    light = ledger.lifecycle_bar(chat.diagnosis.lifecycle_share)
    dark = theme.in_the_dark(light)
    assert [trace.marker.color for trace in dark.data] == [trace.marker.color for trace in light.data]
    assert dark.layout.paper_bgcolor == theme.DARK_PAPER
    assert theme.INK not in dark.to_json() and theme.MUTED not in dark.to_json()
