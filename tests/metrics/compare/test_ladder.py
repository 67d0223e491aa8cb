"""A ladder: multipliers repeat by repeat, accounts that sum to the time of a token, sentences that come from them."""

import msgspec
import pytest

from sojourn.metrics.compare.ladder import Ladder, Rung, RungRun, rung_run, sentence, steps
from sojourn.metrics.compare.ladder_page import page
from sojourn.ui.markup.ladder_report import render
from tests.metrics.synthetic import synthetic_run

LOW, MIDDLE, HIGH = (
    Rung(name="low", on={"policy": "static"}, meaning="It begins."),
    Rung(name="middle", on={"policy": "fcfs"}, published=2.5, meaning="It goes on."),
    Rung(name="high", on={"overlap": "on"}, works_on=("compute.host",), meaning="It hides the host."),
)


def run_of(rung: Rung, repeat: int, tokens_per_s: float, accounts: dict[str, float], **changes) -> RungRun:
    made = RungRun(
        rung=rung.name, repeat=repeat, run=f"{rung.name}-{repeat}", valid=True, reasons=[], sent=40, completed=40,
        output_tokens=4000, goodput_rps=2.0, attainment=1.0, tokens_per_s=tokens_per_s, ttft_ms={"p50": 20.0},
        tpot_ms={"p50": 5.0}, accounts_ms=accounts, batch=8.0, step_ms=4.0,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def ladder(runs: list[RungRun]) -> Ladder:
    plan = {"scenario": {"name": "s", "description": "A load", "engine": {"model": "m"}}, "overrides": {}}
    return Ladder(plan=plan, rungs=[LOW, MIDDLE, HIGH], runs=runs, command="sojourn dev ladder", date="2026-01-01",
                  hardware={"cores": 2, "cpu": "a CPU", "gpus": []}, versions={"torch": "2"}, device="cpu")  # fmt: skip


def made() -> Ladder:
    slow, fast = {"request.queue": 6.0, "compute.decode": 3.0, "compute.host": 1.0}, {"compute.decode": 3.0}
    runs = []
    for repeat, drift in ((1, 1.0), (2, 0.5), (3, 1.0)):  # the machine was slow in the second repeat
        runs += [
            run_of(LOW, repeat, 100 * drift, slow), run_of(MIDDLE, repeat, 200 * drift, fast | {"compute.host": 1.0}),
            run_of(HIGH, repeat, 220 * drift, fast | {"compute.host": 0.5}, batch=16.0, step_ms=6.0),
        ]  # fmt: skip
    return ladder(runs)


def test_a_drift_of_the_machine_is_no_effect_of_a_rung():
    low, middle, high = steps(made())
    assert low.multiplier is None and low.change_ms == {}
    assert (middle.multiplier, middle.lowest, middle.highest) == (2, 2, 2) and middle.resolved
    assert middle.shrank == ("request.queue", -6.0) and middle.grew is None
    assert high.multiplier == pytest.approx(1.1) and high.shrank == ("compute.host", -0.5)
    assert high.reachable == pytest.approx(4 / 3), "the host is a quarter of the rung below"


def test_an_invalid_run_counts_for_nothing_and_a_rung_without_runs_is_left_out():
    known = made()
    known.runs = [msgspec.structs.replace(run, valid=run.rung != "middle") for run in known.runs]
    assert [step.rung.name for step in steps(known)] == ["low", "high"]
    known.runs = [run for run in known.runs if run.rung == "high" and run.repeat == 1] + known.runs[:1]
    assert [step.repeats for step in steps(known)] == [1, 1]
    assert steps(ladder([])) == []


def test_a_sentence_says_what_was_measured_also_where_nothing_was_resolved():
    _, middle, high = steps(made())
    assert sentence(middle) == "It goes on. The account request.queue fell by 6.00 ms a token."
    assert "16.0 requests in place of 8.0" in sentence(high) and "1.33 times as fast" in sentence(high)
    mixed = msgspec.structs.replace(high, lowest=0.9, highest=1.2)
    assert "no effect" in sentence(mixed)


def test_accounts_by_token_sum_to_the_time_of_a_token(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=120)
    found = rung_run(run, "low", 1)
    served = run.requests().query("status == 'ok'")
    assert sum(found.accounts_ms.values()) == pytest.approx(served.e2e_ms.sum() / served.output_tokens.sum())
    assert found.valid and found.batch > 0 and found.step_ms > 0


def test_page_and_report_name_every_rung_and_escape_what_a_scenario_says():
    known = made()
    known.plan["scenario"]["name"] = "<b>s</b>"
    text, html = page(known, steps(known)), render(known)
    for rung in (LOW, MIDDLE, HIGH):
        assert f"| {rung.name} |" in text and rung.name in html
    assert "2.2 times the tokens per second" in text and "`policy=fcfs`" in text
    assert "<b>s</b>" not in html
