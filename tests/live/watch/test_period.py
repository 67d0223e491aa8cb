"""Two periods of a Prometheus: what was asked for is what is read, and a planted change is named."""

import json
from datetime import UTC, datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.interop.sources.sglang import SGLANG
from sojourn.live.watch.period import Period, held_in, read_period
from sojourn.metrics.errors import InputError
from tests.metrics.any_page import SECOND, Life, rows
from tests.metrics.live_pages import serving

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
NOON = NOW.timestamp()


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("2026-11-28T10:00Z..2026-11-28T10:30Z", -7200, -5400), ("10:00..10:30", -7200, -5400),
        ("-2h..-90m", -7200, -5400), ("-30m..", -1800, 0), ("-30m..now", -1800, 0), ("-1.5h..-3600s", -5400, -3600),
        (f"{NOON - 60:.0f}..{NOON:.0f}", -60, 0), ("2026-11-28 11:00:30..12:00", -3570, 0),
        ("2026-11-28T12:00+01:00..-10m", -3600, -600),
    ],
)  # fmt: skip
def test_a_period_is_read(text, begin, end):
    assert read_period(text, NOW) == Period(NOON + begin, NOON + end)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("yesterday", "no period"), ("a..b", "no moment"), ("-1h..-2h", "ends before"), ("-5h..-1h", "longer than 3"),
        ("-1m..13:00", "future"), ("25:00..26:00", "no moment"), ("..", "no moment"),
    ],
)  # fmt: skip
def test_what_is_no_period_is_told(text, says):
    with pytest.raises(InputError, match=says):
        read_period(text, NOW)


def prometheus(servers: dict[str, list[tuple[float, float, Life]]]):
    """Answers raw queries. `servers`: instance → pieces of its life: from, to (seconds since 1970), and what it did."""

    def answer(path: str):
        asked = parse_qs(urlsplit(path).query)
        if asked["query"] == ["1"]:
            return 200, json.dumps({"status": "success", "data": {"result": []}}).encode()
        end = float(asked["time"][0])
        seconds = int(asked["query"][0].rpartition("[")[2].rstrip("s]"))
        series: dict[tuple, list] = {}
        for instance, pieces in servers.items():
            for begin, stop, life in pieces:
                for at in range(int(max(begin, end - seconds)), int(min(stop, end)) + 1, 15):
                    started = {"name": "process_start_time_seconds", "labels": [], "value": begin}
                    for row in (started, *rows(SGLANG, at * SECOND, at - begin, life)):
                        key = (instance, row["name"], tuple(row["labels"]))
                        series.setdefault(key, []).append([at, str(row["value"])])
        found = [
            {"metric": {"__name__": name, "instance": instance, "job": "sglang", **dict(labels)}, "values": values}
            for (instance, name, labels), values in series.items()
        ]
        return 200, json.dumps({"status": "success", "data": {"result": found}}).encode()

    return serving(answer)


FAST, SLOW = Life(2, 0, 2.0, 0.1, 1.0), Life(4, 20, 2.0, 6.0, 8.0)


def test_a_period_gives_the_means_of_its_own_requests_over_a_restart():
    begin = NOON - 3600
    pieces = [(begin - 900, begin, SLOW), (begin, begin + 900, FAST), (begin + 915, begin + 1800, FAST)]
    with prometheus({"gpu1:8000": pieces}) as url:
        held = held_in(url, Period(begin, begin + 1800))
    figures = {each.name: each.value for each in held.figures.figures}
    assert figures["ttft_ms"] == pytest.approx(100, rel=0.02) and figures["running"] == pytest.approx(2, rel=0.02)
    assert held.server == "sglang"


def test_several_servers_are_to_be_chosen_from_and_none_is_told():
    life = [(NOON - 600, NOON, FAST)]
    with prometheus({"gpu1:8000": life, "gpu2:8000": life}) as url:
        with pytest.raises(InputError, match="--select"):
            held_in(url, Period(NOON - 600, NOON))
        with pytest.raises(InputError, match="no metric"):
            held_in(url, Period(NOON - 6000, NOON - 5400))


def test_slower_after_the_change_is_said_by_compare():
    now = datetime.now(UTC).timestamp()
    pieces = [(now - 7200, now - 3700, FAST), (now - 3600, now - 10, SLOW)]
    with prometheus({"gpu1:8000": pieces}) as url:
        words = ["compare", "--prometheus", url, "--before", "-110m..-70m", "--after", "-50m..-10m", "--json"]
        result = CliRunner().invoke(app, words)
        swapped = CliRunner().invoke(app, [*words[:3], "--after", "-110m..-70m", "--before", "-50m..-10m"])
        whole = CliRunner().invoke(app, ["compare", "--prometheus", url, "--before", "-110m..-10m", "--json"])
    found = json.loads(result.output)
    assert found["verdict"] == "worse" and result.exit_code == 1
    assert whole.exit_code == 1, whole.output
    alone = json.loads(whole.output)
    assert "waiting" in [each["name"] for each in alone["changes"]]
    assert len(alone["within"]) == 1 and "the server restarted" in alone["within"][0]
    moved = {each["name"]: each["after"] / each["before"] for each in found["figures"] if each["before"]}
    assert moved["ttft_ms"] == pytest.approx(60, rel=0.05) and moved["e2e_ms"] == pytest.approx(8, rel=0.05)
    assert swapped.exit_code == 0 and "better" in swapped.output


@pytest.mark.parametrize(
    "words", [["--prometheus", "http://x"], ["--before", "-2h..-1h"], ["runs/a", "--prometheus", "http://x"], ["a"]]
)
def test_half_of_it_is_refused(words):
    result = CliRunner().invoke(app, ["compare", *words])
    assert isinstance(result.exception, InputError)


@pytest.mark.parametrize("path", ["", "/prom"])
def test_a_prometheus_that_does_not_answer_is_named_by_its_address_alone(path):
    """And ends as wrong use: 1 would say that B is worse."""
    with prometheus({}) as url:
        pass
    for address in (url + path, url.replace("http:", "https:") + path):
        result = CliRunner().invoke(app, ["compare", "--prometheus", address, "--before", "-2h..-1h"])
        assert isinstance(result.exception, InputError)
        assert f"no server answers at {address} (" in str(result.exception) and "query" not in str(result.exception)
    with serving(lambda _: (404, b"no such page")) as url:
        result = CliRunner().invoke(app, ["compare", "--prometheus", url, "--before", "-2h..-1h"])
        other = CliRunner().invoke(app, ["compare", "--prometheus", url.replace("http", "https"), "--before", "-2h.."])
    assert "does not answer as a Prometheus does (HTTP 404);" in str(result.exception)
    assert f"it speaks http: give {url})" in str(other.exception)
