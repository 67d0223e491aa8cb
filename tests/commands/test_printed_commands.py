"""Commands in the messages of all rooms: each has its verb, and each of its options is one of that verb."""

import ast
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import typer

from sojourn.commands.program import app
from sojourn.commands.summary import next_steps
from sojourn.commands.verbs import OLD_NAMES, VERBS
from sojourn.diagnosis.diagnose import diagnose
from tests.commands.program import parsed, run_program
from tests.metrics.foreign import VllmPage, foreign_run, steady
from tests.metrics.synthetic import synthetic_run

ROOT = Path(__file__).parents[2]
NAMES = sorted({*(verb.name for verb in VERBS), *(name.split()[0] for name in OLD_NAMES)}, key=len, reverse=True)
COMMAND = re.compile(rf"(?<![\w./-])sojourn ((?:{'|'.join(NAMES)})(?![\w-])[^`\n;)<]*)")
LEFT = ("bench", "tests", ".venv", "build", "node_modules")  # rooms whose texts no user of the program reads


def texts_of(tree: ast.AST):
    """Its texts, `{program_name()}` as the program's name and other values as a word."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                part.value if isinstance(part, ast.Constant)
                else "sojourn" if "program_name" in ast.unparse(part.value) else "X"
                for part in node.values
            )  # fmt: skip
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def printed_commands() -> list[tuple[str, str]]:
    found = []
    for file in sorted(ROOT.rglob("*.py")):
        room = file.relative_to(ROOT)
        text = "" if room.parts[0] in LEFT else file.read_text(encoding="utf-8")
        if "sojourn " in text or "program_name" in text:
            found += [(str(room), match[1]) for each in texts_of(ast.parse(text)) for match in COMMAND.finditer(each)]
    return found


def options_of(words: list[str]) -> set[str]:
    """The options of the verb that the words begin with, and of the groups above it."""
    command, known = typer.main.get_command(app), {"--all"}
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
        known |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return known


def test_every_command_in_a_message_has_its_verb_and_options():
    commands = printed_commands()
    wrong = []
    for file, command in commands:
        options = re.findall(r"(?<![\w-])--[a-z][\w-]+", command.split(" beside ")[0])
        words = [word.strip(",.:") for word in command.split()]
        if words[0] != "bench-serve":  # it has vLLM's flags
            wrong += [(file, command, option) for option in set(options) - options_of(words) - {"--help"}]
    assert wrong == [] and len(commands) > 60 and len({file for file, _ in commands}) > 25


@pytest.mark.parametrize("verb", ["diagnose", "explain", "replay", "plan", "report", "export", "kv-lens"])
def test_a_folder_of_runs_offers_the_newest_and_the_command_for_it(tmp_path, verb):
    for number in range(7):
        run = synthetic_run(tmp_path / "runs" / f"r{number}", requests=3)
        run.update_meta(wall_anchor={"monotonic_ns": 0, "unix_ns": 1_700_000_000_000_000_000 + number})
    extra = {"explain": ("--slowest", "ttft"), "replay": ("--set", "max_num_seqs=3")}.get(verb, ())
    done = run_program(verb, "runs", *extra, cwd=tmp_path)
    assert done.returncode == 2 and "a folder of 7 runs" in done.stderr and "and 2 more" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    name, options = parsed("sojourn " + last.partition(f"{verb} ")[1] + last.partition(f"{verb} ")[2])
    assert name == verb and "runs/r6" in [str(value) for each in options.values()
                                          for value in (each if isinstance(each, list) else [each])]  # fmt: skip
    assert all(word in last for word in extra)


def test_compare_with_one_word_names_what_it_needs_and_the_two_newest(tmp_path):
    for number in range(3):
        run = synthetic_run(tmp_path / "runs" / f"r{number}", requests=3)
        run.update_meta(wall_anchor={"monotonic_ns": 0, "unix_ns": 1_700_000_000_000_000_000 + number})
    for given, pair in (("runs", "runs/r1 runs/r2"), ("runs/r1", "runs/r0 runs/r1"), ("runs/r0", "runs/r0 runs/r1"),
                        ("r2", "runs/r1 runs/r2")):  # fmt: skip
        done = run_program("compare", given, cwd=tmp_path)
        assert done.returncode == 2 and "compare takes two: A before and B after" in done.stderr
        assert done.stderr.strip().endswith(f"compare {pair}"), done.stderr
    assert "far does not exist" in run_program("compare", "far", cwd=tmp_path).stderr


@pytest.mark.parametrize("served", [True, False])
def test_the_next_step_of_a_run_can_be_taken(tmp_path, served):
    def refuse_all(records):
        records.client[:] = [msgspec.structs.replace(each, status="error", error="HTTP 500", first_token_ns=None,
                                                     last_byte_ns=None, chunk_ns=[], chunk_tokens=[])
                             for each in records.client]  # fmt: skip
        records.requests.clear()
        records.steps.clear()

    synthetic_run(tmp_path / "a run", requests=30, **({} if served else {"keep": refuse_all}))
    said = run_program("diagnose", "a run", cwd=tmp_path).stdout
    steps = [line.partition("sojourn ")[2] for line in said.splitlines() if re.match(r"(next|in the app) ", line)]
    assert [parsed(f"sojourn {step}")[0] for step in steps] == (["explain", "ui"] if served else ["ui"])
    for step in steps[:-1]:
        assert run_program(*shlex.split(step), cwd=tmp_path).returncode == 0


def slow_at(level: str, path: Path):
    """A run that misses its objective, with the records of one level of evidence."""

    def keep(records):
        for name in {"client": ("steps", "requests"), "requests": ("steps",)}.get(level, ()):
            getattr(records, name).clear()

    if level == "scrapes":
        return foreign_run(path, steady(40, every_s=0.7, prefill_s=0.6), VllmPage())
    return synthetic_run(path, plant="small_batch_cap", requests=60, keep=keep)


@pytest.mark.parametrize(
    ("level", "shows"), [("client", False), ("scrapes", False), ("requests", True), ("steps", True)]
)
def test_the_next_step_has_an_answer_at_every_level_of_evidence(tmp_path, level, shows):
    """A request is explained where its server recorded it. Elsewhere the step says how it would be recorded."""
    run = slow_at(level, tmp_path / "run")
    diagnosis = diagnose(run)
    said = dict(next_steps(run, diagnosis)).get("next", "")
    assert (" explain " in said) is shows
    if shows:
        verb, options = parsed(f"sojourn explain {said.partition(' explain ')[2]}")  # however this program is called
        assert verb == "explain" and options["slowest"] == "ttft"
        return
    proofs = [f"{each.probe.measurement}\n$ {each.probe.command}" for each in diagnosis.findings]
    for step in [said] if said else proofs[:1]:
        words, _, command = step.partition("\n$ ")
        assert "the server's records of each step" in words
        assert parsed(command)[0] in ("load", "run")


def test_the_slow_request_of_the_next_step_is_slow_by_what_is_missed(tmp_path):
    run = synthetic_run(tmp_path / "run", plant="slow_model", requests=40)
    assert dict(next_steps(run, diagnose(run)))["next"].endswith("--slowest tpot")
