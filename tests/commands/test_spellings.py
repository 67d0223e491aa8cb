"""One name for each meaning in all verbs; what others call it works, or is answered by a sentence."""

import pytest
import typer

from sojourn.commands.program import app
from sojourn.commands.spellings import ELSEWHERE, MEANT, respelled
from sojourn.commands.verbs import VERBS
from sojourn.live.watch.fetch import base_of, is_address
from sojourn.metrics.errors import InputError
from tests.commands.program import parsed, run_program

# Verbs that speak another program's language, and names that mean something else there.
OWN_LANGUAGE = {"bench-serve", "dev bench", "locust"}
OTHER_MEANING = {
    ("serve", "--host"), ("serve", "--run-dir"), ("serve", "--served-model-name"),  # settings of the engine
    ("server dashboards", "--target"), ("server dashboards up", "--target"),  # servers to scrape
    ("server fleet up", "--host"),
}  # fmt: skip
SAME_OPTIONS = ("load", "run", "capacity")


def commands():
    """The verbs with their click commands, groups opened."""

    def below(name, command):
        if getattr(command, "commands", None):
            for word in command.commands:
                yield from below(f"{name} {word}".strip(), command.commands[word])
        yield name, command

    yield from below("", typer.main.get_command(app))  # fmt: skip


COMMANDS = dict(commands())


def options_of(name: str) -> set[str]:
    return {option for each in COMMANDS[name].params for option in (*each.opts, *each.secondary_opts)}


def test_no_verb_has_a_name_of_its_own_for_what_has_one():
    assert {verb.name for verb in VERBS} <= COMMANDS.keys()
    wrong = {
        (name, option, MEANT[option])
        for name in COMMANDS.keys() - OWN_LANGUAGE
        for option in options_of(name) & MEANT.keys()
        if (name, option) not in OTHER_MEANING
    }
    assert wrong == set()


def test_what_is_written_is_output_and_a_setting_is_set_in_every_verb():
    writes = [name for name in COMMANDS if "--output" in options_of(name)]
    assert {
        "run", "load", "capacity", "report", "export", "import", "kv-lens", "calibrate client", "calibrate device",
        "server quantize", "server dashboards", "server fleet up", "dev ladder", "dev faults run",
    } <= {*writes}  # fmt: skip
    for name in writes:
        assert "-o" in options_of(name), name
    sets = {name for name in COMMANDS if "--set" in options_of(name)}
    assert {"serve", "run", "capacity", "replay", "calibrate device", "server fleet up", "dev ladder"} <= sets


def test_the_options_of_a_load_are_the_same_in_each_verb_that_sends_one():
    shared = ("slo", "rate", "duration", "requests", "prompt_tokens", "output_tokens", "header")
    pages = []
    for name in SAME_OPTIONS:
        params = {each.name: each for each in COMMANDS[name].params}
        pages.append([(params[each].opts, params[each].help, params[each].metavar) for each in shared])
    assert pages[0] == pages[1] == pages[2]


@pytest.mark.parametrize("spelling", MEANT)
def test_another_spelling_is_read_with_a_hint(spelling, capsys):
    name = MEANT[spelling]
    assert respelled(["x", spelling, "7", f"{spelling}=8"], {name}) == ["x", name, "7", f"{name}=8"]
    assert capsys.readouterr().err.count(f"sojourn: {spelling} is read as {name}\n") == 2
    assert respelled([spelling, "7"], {spelling, name}) == [spelling, "7"]  # where it is the verb's own
    assert respelled(["--", spelling], {name}) == ["--", spelling]


@pytest.mark.parametrize("option", ELSEWHERE)
def test_an_option_that_means_nothing_here_is_answered_with_the_way_to_it(option):
    done = run_program("load", "127.0.0.1:9", option, "3")
    assert done.returncode == 2 and done.stderr.startswith(f"sojourn: {option} ") and len(done.stderr) > 60


# What people type first, from the first pages of these tools.
@pytest.mark.parametrize(
    ("command", "means"),
    [
        ("load http://h:8000 --num-prompts 200 --request-rate 4 --random-input-len 512 --random-output-len 64",  # vllm
         {"requests": 200, "rate": 4.0, "prompt_tokens": 512, "output_tokens": 64}),
        ("load --target http://h:8000 --rate 2 --max-seconds 30 --max-requests 50",  # GuideLLM
         {"base_url": "http://h:8000", "rate": 2.0, "duration": "30", "requests": 50}),
        ("load h:8000 --duration 30s --iterations 100 --rps 5",  # k6
         {"scenario": "h:8000", "duration": "30s", "requests": 100, "rate": 5.0}),
        ("load h:8000 --goodput ttft:500 --osl 32 --isl 128",
         {"slo": "ttft:500", "output_tokens": 32, "prompt_tokens": 128}),
        ("run demo --max-num-seqs 8 --no-prefix-caching",
         {"set_": ["max_num_seqs=8", "prefix_caching=false"]}),
        ("capacity h:8000 --slo ttft=500 --trial-s 20 --start 2", {"slo": "ttft=500", "duration": "20", "rate": 2.0}),
    ],
)  # fmt: skip
def test_what_is_typed_first_works(command, means):
    _, options = parsed(f"sojourn {command}")
    assert {name: options[name] for name in means} == means


@pytest.mark.parametrize("name", [name for name in COMMANDS if "--slo" in options_of(name)])
def test_the_syntax_of_an_slo_is_checked_before_anything(name):
    words = {"import": ["x.json"], "capacity": ["steady-chat"], "server dashboards up": []}.get(name, ["no-such"])
    done = run_program(*name.split(), *([] if name in ("watch", "server dashboards") else words), "--slo", "ttft500")
    assert done.returncode == 2 and "--slo: 'ttft500' names no latency" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["load", "127.0.0.1:9"], ["load", "demo", "--base-url", "127.0.0.1:9/v1/"],
        ["kv-lens", "127.0.0.1:9", "--once"],
        ["capacity", "127.0.0.1:9", "--rates", "1"], ["capacity", "127.0.0.1:9"],
        ["bench-serve", "--base-url", "127.0.0.1:9", "--num-prompts", "1"],
        ["load", "http://127.0.0.1:9/metrics", "--rate", "1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_address_needs_no_scheme(tmp_path, words):
    done = run_program(*words, cwd=tmp_path)
    assert done.returncode == 1 and "no server answers at http://127.0.0.1:9" in done.stderr, done.stderr


@pytest.mark.parametrize(("word", "is_one"), [
    ("127.0.0.1:8000", True), ("gpu-7.example.com:80/v1", True), ("[::1]:8000", True), ("https://api", True),
    ("demo", False), ("runs/a:b", False), ("a.yaml", False), ("C:thing", False),
])  # fmt: skip
def test_a_word_is_an_address_or_a_name(word, is_one):
    assert is_address(word) == is_one


@pytest.mark.parametrize("word", ["not a url", "ftp://x", "http://", "http://u:p@h", "http://h/?q=1", "http://h:99999"])
def test_what_is_no_address_is_refused(word):
    with pytest.raises(InputError, match=r"8000|SOJOURN_API_KEY"):
        base_of(word)
