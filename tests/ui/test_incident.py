"""The moving parts of a report: they judge as our own judge does, and hold what the tables of the run hold."""

import json
import re
from itertools import product

import msgspec
import numpy as np
import pytest

from sojourn.metrics.request.blame import matrix
from sojourn.metrics.request.goodput import class_goodput
from sojourn.metrics.request.objectives import SERVER_OBJECTIVES
from sojourn.metrics.results.load import declared_window_s
from sojourn.ui.markup.before_after import side_by_side
from sojourn.ui.markup.document import as_json
from sojourn.ui.markup.incident import payload as columns
from sojourn.ui.markup.incident.payload import payload
from sojourn.ui.markup.incident.section import for_tools, moving_parts
from sojourn.ui.markup.incident.summary import markdown_summary
from sojourn.ui.markup.run_report import render
from sojourn.ui.run_data import load
from sojourn.ui.screenshots import browser
from tests.ui.conftest import HOSTILE_ID

HOVER = """([x, y]) => {
  const box = document.getElementById("sojourn-timeline").getBoundingClientRect();
  return [box.left + x * box.width, box.top + y * box.height];
}"""


def goods(run, objectives) -> dict[str, tuple[int, float]]:
    rows = class_goodput(run.requests, objectives, declared_window_s(run.meta))
    return {row.klass: (row.good, round(row.goodput_rps, 6)) for row in rows}


def test_columns_are_those_of_the_run(chat):
    held = payload(chat)
    rows = chat.requests.sort_values("due_ns", ignore_index=True)
    assert held["id"] == rows.request_id.tolist() and len(set(map(len, [held["id"], held["due"], held["klass"]]))) == 1
    assert [held["classes"][k] for k in held["klass"]] == rows.klass.tolist()
    of_ledger = np.array([[np.nan if cell is None else cell for cell in column] for column in held["ledger"]])
    served = rows.e2e_ms.notna().to_numpy()
    assert of_ledger.sum(axis=0)[served] == pytest.approx(rows.e2e_ms[served].to_numpy(dtype=float), abs=0.3)
    delays = matrix(chat.book, rows.set_index("request_id").klass).reindex(rows.request_id)
    assert np.array(held["blame"], dtype=float).sum(axis=0) == pytest.approx(delays.sum(axis=1) / 1e6, abs=0.3)
    assert sum(held["steps"]["prompt"]) + sum(held["steps"]["decode"]) == chat.steps.new_tokens.map(sum).sum()


def test_stretches_of_steps_hold_all_tokens(chat, monkeypatch):
    whole = payload(chat)["steps"]
    monkeypatch.setattr(columns, "MOST_STEPS", 7)
    held = payload(chat)["steps"]
    assert len(held["begin"]) <= 7
    assert all(sum(held[name]) == pytest.approx(sum(whole[name]), abs=0.1) for name in ("ms", "prompt", "decode"))


def test_run_that_is_too_large_for_a_page_says_where_it_is_shown(chat, monkeypatch):
    monkeypatch.setattr("sojourn.ui.markup.incident.section.MOST_REQUESTS", len(chat.requests))
    assert "sojourn-run" in moving_parts(chat)
    monkeypatch.setattr("sojourn.ui.markup.incident.section.MOST_REQUESTS", len(chat.requests) - 1)
    assert "sojourn ui" in moving_parts(chat) and "sojourn-run" not in moving_parts(chat)


def test_data_cannot_end_its_element():
    assert as_json("x", {"</script>": "<b>"}).count("<") == 2
    assert json.loads(as_json("x", ["</script>"]).split(">", 1)[1].removesuffix("</script>")) == ["</script>"]


def test_tools_read_the_diagnosis_and_a_summary(runs, chat):
    text = for_tools(chat)
    held = text.split('id="sojourn-diagnosis">')[1].split("</script>")[0]
    assert json.loads(held) == msgspec.to_builtins(chat.diagnosis)
    summary = markdown_summary(chat.name, chat.diagnosis)
    assert chat.diagnosis.headline in summary
    assert all(found.cause in summary and found.fix.change in summary for found in chat.diagnosis.findings)
    hostile = msgspec.structs.replace(chat.diagnosis, headline=HOSTILE_ID)
    assert "<img" not in for_tools(load(runs / "hostile", hostile))


def test_two_runs_stand_beside_each_other(runs, chat):
    other = load(runs / "tiny-kv")
    text = side_by_side(chat, other)
    assert "What differs" in text and "To the first token" in text and "memory.blocked" in text
    assert "Before and after" in render(chat, other) and "Before and after" not in render(chat)
    assert "sojourn-run-other" in moving_parts(chat, other).split("<script>")[0]
    assert 'id="sojourn-run-other"' not in moving_parts(chat)


def test_a_is_the_older_run_everywhere_on_the_page(runs, chat):
    other = load(runs / "tiny-kv")
    for page in (render(chat, other), render(other, chat)):
        a = re.search("<p>A: (.+?)[.] B: ", page)[1]
        held = json.loads(page.split('id="sojourn-run">')[1].split("</script>")[0])
        assert held["name"] == a
        assert "no verdict" in page and "--force" in page and f"{a} " in page.split("sojourn compare ")[1]


@pytest.mark.browser
def test_two_timelines_move_together_and_share_their_bounds(runs, chat, tmp_path):
    other = load(runs / "tiny-kv")
    file, errors = tmp_path / "report.html", []
    file.write_text(render(chat, other), encoding="utf-8")
    with browser() as opened:
        page = opened.new_page(viewport={"width": 1200, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_function("window.sojournDrawn > 0")
        judged = [page.evaluate(f"window.{name}") for name in ("sojournJudged", "sojournOther")]
        pixels = "document.getElementById('sojourn-other-timeline').toDataURL()"
        before = page.evaluate(pixels)
        page.locator("#sojourn-timeline").focus()
        page.keyboard.press("+")
        after = page.evaluate(pixels)
        page.locator("#sojourn-other-timeline").scroll_into_view_if_needed()
        for x in range(10, 100):
            page.mouse.click(*page.evaluate(HOVER.replace("timeline", "other-timeline"), [x / 100, 0.02]))
            if " in B" in (ledger := page.locator("#sojourn-ledger h4").first.inner_text()):
                break
        boxes = [page.locator(f"#sojourn-{name}timeline").bounding_box() for name in ("", "other-")]
        all_of_them = "[...document.querySelectorAll('details.sj-values')]"
        opened_tables = page.evaluate(f"{all_of_them}.map((each) => {{ each.open = true; return each; }}).length")
        page.wait_for_function(f"{all_of_them}.every((each) => each.querySelector('td'))")
        attainment = page.locator("#goodput details.sj-values").nth(1).locator("tbody tr").all_inner_texts()
    assert errors == [] and before != after
    assert {row["name"]: row["good"] for row in judged[0]} == {
        name: good for name, (good, _) in goods(chat, chat.meta["objectives"]).items()
    }
    assert judged[1][0]["sent"] == len(other.requests)
    assert ledger.startswith("Ledger of r") and " in B: " in ledger
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    assert opened_tables > 8
    assert len(attainment) == len(chat.diagnosis.goodput)


@pytest.mark.browser
def test_the_page_judges_as_we_do_and_shows_any_request(runs, chat, tmp_path):
    file, errors = tmp_path / "report.html", []
    file.write_text(render(chat), encoding="utf-8")
    classes = payload(chat)["classes"]
    with browser() as opened:
        page = opened.new_page(viewport={"width": 1200, "height": 900})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(file.as_uri())
        page.wait_for_function("window.sojournDrawn > 0")
        fields = page.locator(".sj-bound input[type=number]")
        assert fields.count() == len(classes) * len(SERVER_OBJECTIVES)
        shown = [page.evaluate("window.sojournJudged")]
        expected = [goods(chat, chat.meta["objectives"])]
        for scale in (0.0, 0.3, 1.0, 4.0):
            stated = []
            for place, (klass, name) in enumerate(product(classes, SERVER_OBJECTIVES)):
                bound = round(scale * float(chat.requests[chat.requests.klass == klass][name].median()), 3)
                fields.nth(place).fill(str(bound) if bound else "")
                stated.append({"klass": klass, name: bound} if bound else {"klass": klass})
            shown.append(page.evaluate("window.sojournJudged"))
            expected.append(goods(chat, stated))
        first = chat.requests.sort_values("due_ns").request_id.iloc[0]
        page.locator("#sojourn-request").fill(first)
        page.locator("#sojourn-request").press("Enter")
        page.locator("#sojourn-request").blur()
        ledger = page.locator("#sojourn-ledger").inner_text()
        page.locator("#sojourn-timeline").scroll_into_view_if_needed()
        hovered = ""
        for x in range(4, 100):
            page.mouse.move(*page.evaluate(HOVER, [x / 100, 0.02]))
            if page.locator("#sojourn-hover").is_visible():
                hovered = page.locator("#sojourn-hover").inner_text()
                break
    assert errors == []
    for rows, own in zip(shown, expected, strict=True):
        assert {row["name"]: (row["good"], round(row["rps"], 6)) for row in rows} == own
    assert f"Ledger of {first}" in ledger and "compute." in ledger
    assert "TTFT" in hovered and "delayed by" in hovered


def test_summary_names_the_spans_of_a_foreign_server(runs):
    run = load(runs / "vllm")
    view = run.diagnosis.server
    summary = markdown_summary(run.name, run.diagnosis)
    assert (
        f"{view.title}'s decode time " in summary
        and " + " not in summary.split("Time of all requests: ")[1].split("\n")[0]
    )
