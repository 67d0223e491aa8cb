"""The verdict fits one screen at 80 columns, and says what it leaves out."""

import io
import re
from dataclasses import replace

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.proposal import gain
from sojourn.diagnosis.regained import regains, tell_replay
from sojourn.diagnosis.terminal.short_report import MOST_LINES, ShortReport
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.metrics.prediction import Change, Interval, Prediction
from tests.diagnosis.terminal.test_terminal import printed as whole
from tests.diagnosis.terminal.test_terminal import words
from tests.further import further
from tests.metrics.synthetic import PLANTS, synthetic_pair, synthetic_run

PLANTED = ["small_batch_cap", "slow_model", "client_lag", *further(*sorted({*PLANTS} - {"small_batch_cap"}))]
ENDS = [("next", "sojourn explain runs/demo --slowest ttft"), ("in the app", "sojourn ui runs/demo")]
REST = "sojourn diagnose runs/demo -v"


def printed(diagnosis: Diagnosis) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(ShortReport(diagnosis, REST, ENDS))
    return out.getvalue()


def assert_fits(text: str) -> None:
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES < 40 and max(map(cell_len, lines)) <= 80
    assert lines[-1].startswith("everything") or REST in text
    assert "takes a second run" not in text and "needs a second run" not in text and " 0.0 ms" not in text


def assert_complete(text: str, diagnosis: Diagnosis) -> None:
    """What a reader must know: the verdict, each cause with its fix or its number, doubts, and goodput."""
    told = "".join(words(text))  # without spaces: a long path may be folded within a word
    assert "".join(words(diagnosis.headline)) in told
    assert diagnosis.state in text and "goodput" in text and "next" in text
    assert " %" not in text
    causes = [each for each in diagnosis.findings if each.role == "cause"]
    for found in causes[:1]:
        for sentence in (found.cause, found.fix.change, found.fix.gain, f"{found.confidence:.0%}", found.unsafe):
            assert "".join(words(sentence)) in told
    for kind, sentences in (
        ("cause", [each.cause for each in causes]), ("warning", [*diagnosis.warnings, *diagnosis.left_out]),
        ("possible cause", [each.cause for each in diagnosis.findings if each.role == "alternative"]),
    ):  # fmt: skip
        missing = [each for each in sentences if "".join(words(each)) not in told]
        counted = re.search(
            rf"(\d+)more{kind.replace(' ', '')}", told
        )  # what is left out may also stand in another sentence
        assert not missing or int(counted[1]) >= len(missing)


@pytest.mark.parametrize("plant", PLANTED)
def test_verdict_fits_one_screen_and_loses_nothing_important(tmp_path, plant):
    for level in ("client", "all"):
        diagnosis = diagnose(synthetic_run(tmp_path / level, plant=plant, requests=120), level=level)
        text = printed(diagnosis)
        assert_fits(text)
        assert_complete(text, diagnosis)


def test_two_runs_fit_one_screen(tmp_path):
    diagnosis = diagnose(*synthetic_pair(tmp_path, pair="benchmark_good_product_bad"))
    assert_fits(printed(diagnosis))
    assert_complete(printed(diagnosis), diagnosis)


def test_what_does_not_fit_is_counted(tmp_path):
    diagnosis = diagnose(synthetic_run(tmp_path / "run", plant="small_batch_cap", requests=120))
    (found, *_), many = diagnosis.findings, 12
    others = [
        msgspec.structs.replace(found, cause=f"{found.cause} {place} {'very ' * 30}much") for place in range(many)
    ]
    alike = [msgspec.structs.replace(each, role="alternative", cause=f"or {each.cause}") for each in others]
    crowded = msgspec.structs.replace(
        diagnosis, findings=[found, *others, *alike],
        warnings=[f"warning {place} {'x' * 200}" for place in range(many)],
        left_out=["two of five replays did not fit into 10 s: `sojourn diagnose runs/demo --thorough` makes them"],
    )  # fmt: skip
    text = printed(crowded)
    assert_fits(text)
    assert_complete(text, crowded)
    assert "more warnings" in text and "more causes" in text
    heads = sum(line[:1].isdigit() for line in text.splitlines())
    assert heads >= 1 and all(text.count(f"\n  {label} ") <= heads for label in ("fix", "evidence", "prove it"))


@pytest.mark.parametrize(("bounds", "told"), [
    ({"tpot_ms": 1.0}, "TPOT ≤ 1 ms: 60 (100%)"),
    ({"ttft_ms": 9e9, "e2e_ms": 1.0}, "E2E ≤ 1 ms: 60 (100%)"),
    ({"ttft_ms": 40.0, "tpot_ms": 1.0}, r"TTFT ≤ 40 ms: \d+ \(\d+%\) · TPOT ≤ 1 ms: 60 \(100%\), \d+ of .*"),
])  # fmt: skip
@pytest.mark.parametrize("level", ["client", "all"])
def test_each_missed_objective_is_named_with_its_count(tmp_path, bounds, told, level):
    stated = [{"klass": "all", "source": "chosen for the test"} | bounds]
    text = printed(diagnose(synthetic_run(tmp_path / "run", requests=60, objectives=stated), level=level))
    (line,) = (line for line in text.splitlines() if line.startswith("missed"))
    line = " ".join(text[text.index(line) :].partition("latency")[0].split())
    assert re.fullmatch(f"missed {told if 'd+' in told else re.escape(told)}", line), line


def test_requests_that_failed_are_named_beside_those_that_are_late(tmp_path):
    def fail_some(records):
        records.client[:] = [msgspec.structs.replace(each, status="error", error="HTTP 500") if place % 3 == 0 else each
                             for place, each in enumerate(records.client)]  # fmt: skip

    stated = [{"klass": "all", "source": "chosen for the test", "tpot_ms": 1.0}]
    text = printed(diagnose(synthetic_run(tmp_path / "run", requests=60, objectives=stated, keep=fail_some)))
    assert "missed       TPOT ≤ 1 ms: 40 (67%) · not served: 20 (33%)" in text
    whole_run = printed(diagnose(synthetic_run(tmp_path / "fine", requests=60)))
    assert "missed " not in whole_run


def test_change_that_regains_nothing_is_not_called_a_fix(tmp_path):
    """Requests wait for a batch slot, and each token is too slow, too: without the queue they meet one SLO of two."""
    bounds = ({"klass": "all", "ttft_ms": 400.0, "tpot_ms": 5.0, "source": "chosen for the test"},)
    run = synthetic_run(tmp_path / "run", plant=replace(PLANTS["small_batch_cap"], objectives=bounds), requests=120)
    facts, diagnosis = read_evidence(run), diagnose(run)
    nothing = gain(facts, {"request.queue": 1.0})
    assert nothing.statement.endswith("TTFT would be met, TPOT still missed") and not nothing.regains
    means_alone = gain(replace(facts, rows=facts.rows.head(0)), {"request.queue": 1.0})
    assert means_alone.statement == "the gain is not known"
    quick, slow = Interval(50.0, 60.0, 70.0), Interval(40.0, 50.0, 60.0)
    replayed = Prediction(
        change=Change(), attainment=Interval(0.0, 0.0, 0.1), goodput_rps=slow, ttft_ms={"p90": quick},
        tpot_ms={"p90": slow}, e2e_ms={}, attainment_by_class={}, output_tokens_per_s=1.0, preemptions=0,
        is_trusted=True, doubts=[],
    )  # fmt: skip
    assert tell_replay(facts, replayed, None) == (nothing.statement, False)
    (found, *_) = diagnosis.findings
    fix = msgspec.structs.replace(found.fix, gain=nothing.statement, regains=False)
    diagnosis = msgspec.structs.replace(diagnosis, findings=[msgspec.structs.replace(found, fix=fix)])
    for text in (printed(diagnosis), whole(diagnosis, 80)):
        assert "change " in text and not re.search(r"^[│ ]*fix ", text, re.MULTILINE)


@pytest.mark.parametrize(("now", "then", "gains"), [(0.11, 0.11, False), (0.11, 0.114, False), (0.11, 0.12, True)])
def test_gain_that_no_reader_sees_is_none(now, then, gains):
    assert regains(now, then) is gains
