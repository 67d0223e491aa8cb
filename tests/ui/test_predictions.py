"""Predictions stand beside what was measured: the ledger of verified ones, and those of a finding."""

import math

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.replay.verdict.ledger import FILE_NAME, Checked, LedgerEntry, append
from sojourn.ui.figures.ledger_of_predictions import before_and_after, predicted_against_measured
from sojourn.ui.figures.predictions import now_fix_rival
from sojourn.ui.markup.confidence import in_words, sentence
from sojourn.ui.run_data import read_diagnosis
from tests.metrics.synthetic import synthetic_run
from tests.ui.test_app import html, messages, opened


def entry(measured: float, hit: bool) -> LedgerEntry:
    figures = [
        Checked(name="attainment", before=0.2, low=0.8, median=0.9, high=0.95, measured=measured, hit=hit,
                error=measured - 0.9),
        Checked(name="ttft_ms:p50", before=900.0, low=100.0, median=120.0, high=150.0, measured=130.0, hit=True,
                error=0.08),
    ]  # fmt: skip
    return LedgerEntry(
        when="2026-11-23T12:00:00Z", build="1", run="demo", run2="<script>", scenario="demo",
        change=Change(settings={"max_num_seqs": 18}), predicted_by="diagnosis", cause="batch_cap", figures=figures,
        hit=hit, error=measured - 0.9,
    )  # fmt: skip


def prediction(median: float, **change) -> Prediction:
    around = Interval(median - 0.05, median, min(1.0, median + 0.05))
    return Prediction(
        change=Change(**change), attainment=around, goodput_rps=around, ttft_ms={}, tpot_ms={}, e2e_ms={},
        attainment_by_class={}, output_tokens_per_s=1.0, preemptions=0, is_trusted=True, doubts=[],
    )  # fmt: skip


def test_ledger_page_shows_each_pair_before_predicted_and_measured(tmp_path, monkeypatch):
    synthetic_run(tmp_path / "chat", requests=10)
    app = opened(tmp_path, "predictions", "chat", monkeypatch)
    assert not app.exception and "sojourn verify RUN RUN2" in messages(app)
    for each in (entry(0.91, True), entry(0.5, False)):
        append(tmp_path / FILE_NAME, each)
    app = opened(tmp_path, "predictions", "chat", monkeypatch)
    assert not app.exception, app.exception
    shown = html(app)
    assert "<script" not in shown and len(app.get("plotly_chart")) == 2
    assert "−40" in shown and "miss" in shown and "80" in shown  # the latest pair first


def test_figures_of_the_ledger_tell_hits_from_misses():
    entries = [entry(0.91, True), entry(0.5, False)]
    assert [trace.name for trace in predicted_against_measured(entries).data] == ["as predicted", "hit (1)", "miss (1)"]
    measured = next(trace for trace in before_and_after(entries[1]).data if trace.name == "measured")
    assert list(measured.x) == pytest.approx([2.5, 130 / 900])


def test_finding_shows_now_fix_and_rival_with_intervals(tmp_path):
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=60))
    found = msgspec.structs.replace(
        diagnosis.findings[0], confidence=0.9, unsafe="the load generator was late", gain_is_estimate=False,
        prediction=prediction(0.9, settings={"max_num_seqs": 14}), rival_prediction=prediction(0.3, device_speed=2.0),
    )  # fmt: skip
    figure = now_fix_rival(diagnosis, found)
    assert [trace.name for trace in figure.data] == ["now, measured", "fix: max_num_seqs=14", "rival: device ×2"]
    assert figure.data[1].x[0] == pytest.approx(90) and figure.data[1].error_x.array[0] == pytest.approx(5)
    text = sentence(diagnosis, found).replace("\u2009", " ").replace("\u00a0", " ")
    assert "Very likely" in text and "90%" in text and "rival it would be 30%" in text and "was late" in text
    unknown = msgspec.structs.replace(found.prediction, attainment=Interval(0.02, 0.6, 0.99))
    found = msgspec.structs.replace(found, prediction=unknown, rival_prediction=unknown)
    assert now_fix_rival(diagnosis, found).data[1].text == ("cannot be predicted",)
    assert sentence(diagnosis, found).count("cannot be predicted") == 2
    nothing = msgspec.structs.replace(unknown, attainment=Interval(*[float("nan")] * 3))  # of a run without objectives
    assert now_fix_rival(diagnosis, msgspec.structs.replace(found, prediction=nothing)).data[1].text == ("–",)


def test_confidence_has_a_word_at_every_number():
    assert [in_words(share / 10) for share in range(11)] == (
        ["unlikely"] * 4 + ["open"] * 3 + ["likely"] * 2 + ["very likely"] * 2
    )


def test_diagnosis_is_read_again_where_a_predicted_quantile_lies_among_failures(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=60)
    made = diagnose(run)
    nowhere = Interval(math.nan, math.nan, math.inf)
    found = msgspec.structs.replace(
        made.findings[0], prediction=msgspec.structs.replace(prediction(0.9), ttft_ms={"p99": nowhere})
    )
    run.write_json("diagnosis.json", msgspec.to_builtins(msgspec.structs.replace(made, findings=[found])))
    again, reason = read_diagnosis(run)
    assert not reason and again.findings[0].prediction.attainment.median == pytest.approx(0.9)
    assert math.isnan(again.findings[0].prediction.ttft_ms["p99"].median)
