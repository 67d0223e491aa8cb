"""A load that the command line says: each option is in what is sent, or is refused by its name."""

import json
import os

import pytest

from sojourn.commands.load_options import _declared
from sojourn.loadgen.scenario.options import LoadOptions, made_scenario, with_options
from sojourn.loadgen.scenario.scenario import Scenario, bundled_scenarios, load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.extent import extent_of
from sojourn.metrics.errors import InputError
from tests.commands.program import run_program
from tests.loadgen.scripted_server import Script, ScriptedServer

EACH = {
    "slo": LoadOptions(slo={"e2e_ms": 77.0}), "rate": LoadOptions(rate=7.5), "duration": LoadOptions(duration_s=6.0),
    "requests": LoadOptions(requests=9), "prompt-tokens": LoadOptions(prompt_tokens=900),
    "output-tokens": LoadOptions(output_tokens=5), "header": LoadOptions(headers={"X-Team": "${TEAM}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", bundled_scenarios())
@pytest.mark.parametrize("option", EACH)
def test_an_option_is_in_the_schedule_or_is_refused_by_its_name(name, option):
    scenario, asked = load_scenario(name), EACH[option]
    try:
        changed = with_options(scenario, asked)
    except InputError as error:
        assert str(error).startswith(f"--{option}") and name in str(error)
        return
    assert Scenario(**changed.model_dump(mode="json")) == changed  # as a file and as run.json have it
    sent = [each for each in build_schedule(changed, 1, "t") if not each.prelude]
    of_one_turn = changed.workload.each_arrival == "one_class" and all(
        each.session is None for each in changed.workload.classes
    )
    assert {
        "slo": lambda: [each.e2e_ms for each in changed.objectives] == [77.0],
        "rate": lambda: changed.arrivals.rate_rps == 7.5,
        "duration": lambda: changed.arrivals.closed_loop or max(e.due_offset_ns or 0 for e in sent) <= 6.0e9,
        "requests": lambda: len(sent) == 9 or not of_one_turn,
        "prompt-tokens": lambda: all(each.prompt_tokens == 900 for each in sent if not each.turn),
        "output-tokens": lambda: {each.max_tokens for each in sent} == {5},
        "header": lambda: changed.target.headers["X-Team"] == "${TEAM}",
    }[option]()
    untouched = {key: value for key, value in scenario.model_dump().items() if key in ("engine", "measure", "fleet")}
    assert untouched == {key: changed.model_dump()[key] for key in untouched}


def test_one_bound_replaces_the_other_and_two_hold_both():
    arrivals = with_options(load_scenario("steady-chat"), LoadOptions(requests=500)).arrivals
    assert (arrivals.count, arrivals.duration_s) == (500, None)
    both = made_scenario(LoadOptions(rate=4.0, requests=500, duration_s=10.0)).arrivals
    assert (both.rate_rps, both.count, both.duration_s) == (4.0, 500, 10.0)


@pytest.mark.parametrize("text", ["90", "90s", "1.5m", "1.5 min", "0.025h", "90000ms"])
def test_a_duration_has_a_unit_or_is_in_seconds(text):
    assert _declared(duration=text).duration_s == 90.0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--duration", "0"), "--duration: '0' is no time"), (("--duration", "5 parsecs"), "no time"),
        (("--header", "X-Team"), "'Name: value'"), (("-H", "X: a", "-H", "x: b"), "given twice"),
        (("-H", "Host: x"), "--header has Host, which is set by itself"), (("-H", "X: a\r\nY: b"), "characters"),
        (("--base-url", "h:1"), "two addresses"), (("--prompt-tokens", "99999999"), "--prompt-tokens is 99999999"),
    ],
)  # fmt: skip
def test_wrong_values_are_named_by_their_option(tmp_path, words, says):
    done = run_program("load", "127.0.0.1:9", "--rate", "1", *words, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mine.yaml", "127.0.0.1:9"), "the scenario file mine.yaml does not exist; did you mean `mines.yaml`?"),
        (("demo.yaml",), "the scenario file demo.yaml does not exist; did you mean `demo`?"),
        (("far/x.yml", "--base-url", "h:1"), "far/x.yml does not exist: there is no folder far"),
        (("dem", "127.0.0.1:9"), "'dem' is neither a file nor bundled; did you mean `demo`?"),
        (("demo",), "no server is named"),
        (("demo", "burst"), "two scenarios"),
        (("h:1", "h:2"), "two addresses"),
        (("demo", "h:1", "--base-url", "h:2"), "two addresses"),
    ],
)
@pytest.mark.parametrize("verb", ["load", "capacity"])
def test_a_scenario_and_an_address_are_taken_in_any_order_and_wrong_words_are_named(tmp_path, verb, words, says):
    (tmp_path / "mines.yaml").write_text("")
    for given in (words, words[1::-1] + words[2:] if words[1:2] and words[1][0] != "-" else words):
        if verb == "capacity" and words == ("demo",):
            continue  # it starts a server of its own
        done = run_program(verb, *given, cwd=tmp_path)
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert max(map(len, done.stderr.split())) < 80


@pytest.mark.parametrize("words", [("steady-chat", "127.0.0.1:9"), ("127.0.0.1:9", "steady-chat")])
@pytest.mark.parametrize("verb", [("load",), ("capacity", "--rates", "2")])
def test_both_orders_of_scenario_and_address_reach_the_server(tmp_path, verb, words):
    done = run_program(*verb, *words, cwd=tmp_path)
    assert done.returncode == 1 and "no server answers at http://127.0.0.1:9 " in done.stderr, done.stderr


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions/", "/health", "/v1", "/metrics", "/"])
@pytest.mark.parametrize("verb", [("load", "--rate", "9"), ("watch", "--once", "--for", "2")])
def test_an_address_with_the_path_of_an_endpoint_is_that_of_its_server(tmp_path, verb, path):
    done = run_program(verb[0], f"127.0.0.1:9{path}", *verb[1:], cwd=tmp_path)
    said = f"{done.stdout}{done.stderr}"
    assert "http://127.0.0.1:9" in said and (path in ("/", "/metrics") or f"http://127.0.0.1:9{path}" not in said)
    cut = f"takes http://127.0.0.1:9 as the server; {path.rstrip('/')} is one of its paths"
    assert (cut in done.stderr) is (path not in ("/v1", "/metrics", "/"))


def test_the_weight_of_the_demo_is_said_before_it_is_sent(tmp_path):
    done = run_program("load", "demo", "--base-url", "127.0.0.1:9", cwd=tmp_path)
    said = " ".join(done.stdout.split())
    assert "sends 1,110 requests in 60 s (18.5 per second; 2 of them warm-up): about 396,000 prompt tokens" in said
    assert extent_of(load_scenario("demo"), 1).requests == 1110 and done.returncode == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (LoadOptions(rate=1.0, requests=2), "2 requests in 2 s (1 per second)"),
        (LoadOptions(rate=20.0, requests=6), "6 requests in 0.3 s (20 per second)"),
        (LoadOptions(rate=4.0, requests=20, duration_s=90.0), "20 requests in 5 s (4 per second)"),
        (
            LoadOptions(rate=4.0, duration_s=5.0),
            "16 requests in 5 s (3.2 per second; drawn at 4 per second, of which about 20 are expected)",
        ),
        (LoadOptions(rate=0.5, duration_s=2.0), "1 request in 2 s (0.5 per second)"),
    ],
)
def test_the_announced_rate_is_the_one_that_was_asked_for(asked, says):
    assert extent_of(made_scenario(asked), 1).sentences()[0] == says


@pytest.mark.server
def test_what_was_said_is_sent_and_recorded_and_no_value_of_a_header_is_kept(tmp_path):
    server = ScriptedServer(Script(num_tokens=3)).start()
    words = ["--rate", "20", "--requests", "6", "--prompt-tokens", "30", "--output-tokens", "3", "--slo", "ttft:900"]
    secret = ["-H", "X-Team: s3cr3t-a", "-H", "Authorization: Basic s3cr3t-b"]
    done = run_program("load", server.url.removeprefix("http://"), *words, *secret, cwd=tmp_path)
    assert done.returncode in (0, 4), done.stderr  # a busy machine may send late
    assert [each["headers"]["X-Team"] for each in server.seen] == ["s3cr3t-a"] * 6
    assert {each["headers"]["Authorization"] for each in server.seen} == {"Basic s3cr3t-b"}
    assert {each["body"]["max_tokens"] for each in server.seen} == {3}
    (run,) = (tmp_path / "runs").iterdir()
    assert not [file for file in run.rglob("*") if file.is_file() and b"s3cr3t" in file.read_bytes()]
    meta = json.loads((run / "run.json").read_text())
    assert meta["scenario"]["target"]["headers"]["X-Team"] == "${SOJOURN_HEADER_X_TEAM}"
    assert meta["scenario"]["arrivals"]["count"] == 6 and meta["objectives"][0]["ttft_ms"] == 900.0
    assert load_scenario(run / "scenario.yaml").model_dump(mode="json") == meta["scenario"]
    words = meta["command"]
    assert words[:2] == ["sojourn", "load"] and words[2].endswith("scenario.yaml") and "s3cr3t" not in str(words)
    assert "s3cr3t" not in done.stdout + done.stderr and "SOJOURN_HEADER_X_TEAM" not in os.environ
