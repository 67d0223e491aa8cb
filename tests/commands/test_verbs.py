"""The table of verbs: help, completion, docs and printed commands follow it, and old names go on working."""

import gzip
import os
import re
import subprocess
import sys

import pytest
import typer

from sojourn.commands.program import app
from sojourn.commands.verbs import GROUPS, HOLDERS, OLD_NAMES, VERBS
from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run
from tests.repository import ROOT, repository_files

MAIN = ["watch", "load", "run", "diagnose", "explain", "replay", "plan", "size", "compare", "report", "ui"]
FIRST_WORDS = {verb.name.split()[0] for verb in VERBS}


def listed(page: str) -> list[str]:
    """The names in the left column."""
    return re.findall(r"^  ([a-z][\w-]*(?: [\w-]+)?)  ", page, re.MULTILINE)


def test_help_shows_the_main_verbs_and_all_of_them_in_groups_when_asked():
    assert listed(run_program("--help").stdout) == MAIN
    pages = {run_program(*words).stdout for words in (["help", "--all"], ["--help", "--all"], ["--all", "-h"])}
    assert len(pages) == 1 and listed(page := pages.pop()) == [verb.name for verb in VERBS]
    assert [line for line in page.splitlines() if line in GROUPS] == list(GROUPS)
    for holder in HOLDERS:
        below = [verb.name.removeprefix(f"{holder} ") for verb in VERBS if verb.name.startswith(f"{holder} ")]
        assert listed(run_program(holder, "--help").stdout) == below
    assert run_program("help", "explain").stdout == run_program("explain", "--help").stdout


def test_the_page_of_commands_has_the_same_groups_and_verbs():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, re.MULTILINE))
    for group, verbs in GROUPS.items():
        rows = re.findall(r"^\| `sojourn ([^`]*)`", sections[group], re.MULTILINE)
        names = {
            max((verb.name for verb in VERBS if f"{row} ".startswith(f"{verb.name} ")), default=row) for row in rows
        }
        assert names == {verb.name for verb in verbs}, group
    once = re.findall(r"^\| (`[^|]*`) \|", sections["Old names"], re.MULTILINE)
    assert {*re.findall(r"`([^`]+)`", " ".join(once))} == {*OLD_NAMES} - {"export"}


@pytest.mark.parametrize("old", [name for name, change in OLD_NAMES.items() if change.to != name])
def test_an_old_name_does_what_the_new_one_does_with_a_hint_on_stderr(old):
    change = OLD_NAMES[old]
    words, new = old.split(), change.to.split()
    if old in HOLDERS:  # its --help is that of the group
        words, new = [*words, "--quick"], [*new, "--quick"]
    asked, now = (run_program(*each, "--help") for each in (words, new))
    assert asked.returncode == 0 and asked.stdout == now.stdout and not now.stderr
    assert asked.stderr == f"sojourn: `{old}` is now `{change.to}`\n"
    for option in change.options.values():
        assert f"  {option} " in now.stdout


def test_old_options_keep_their_meaning(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=8)
    files = [tmp_path / "old.json.gz", tmp_path / "new.json.gz"]
    old = run_program("trace", str(run.path), "--from", "0", "--to=0.5", "-o", str(files[0]))
    new = run_program(
        "export", str(run.path), "--to", "perfetto", "--from", "0", "--until", "0.5", "--output", str(files[1])
    )
    assert old.returncode == new.returncode == 0 and "`--to` is now `--until`" in old.stderr
    assert len({gzip.decompress(file.read_bytes()) for file in files}) == 1 and "is now" not in old.stdout + new.stderr
    vllm = run_program("export", str(run.path), "--format", "aiperf")
    assert vllm.returncode == 0 and (run.path / "profile_export.jsonl").exists()
    assert vllm.stderr == "sojourn: `--format` is now `--to`\n"
    bare = run_program("sweep", "steady-chat")
    assert bare.returncode == 2 and "sojourn capacity --rates" in bare.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tracee"], "`sojourn export --to perfetto`"), (["otlp"], "`sojourn join --receive` or `sojourn join`"),
        (["dashboard"], "`sojourn server dashboards`"), (["wach"], "`sojourn watch`"),
        (["device"], "`sojourn calibrate device`"), (["zzz"], "`sojourn help --all` lists all"),
        (["help", "quantise"], "`sojourn server quantize`"),
    ],
)  # fmt: skip
def test_an_unknown_verb_is_answered_by_the_one_that_may_be_meant(words, says):
    done = run_program(*words)
    assert done.returncode == 2 and says in done.stderr and repr(words[-1]) in done.stderr


def test_no_file_prints_an_old_name():
    listed = [path.relative_to(ROOT).as_posix() for path in repository_files()]
    old = "|".join(sorted(OLD_NAMES.keys() - FIRST_WORDS - {"calibrate"}, key=len, reverse=True))
    wrong = re.compile(
        rf"(?<![\w/-])sojourn`?\s(?:{old}|calibrate(?! client| device))(?![\w-])|sojourn export [^\n`]*--format"
    )
    kept = {"CHANGELOG.md", "tests/commands/test_verbs.py"}
    kinds = (".py", ".md", ".sh", ".yaml", ".json", ".html", ".js", "Makefile")
    read = [name for name in listed if name not in kept and name.endswith(kinds)]
    hits = {name: wrong.findall((ROOT / name).read_text(encoding="utf-8")) for name in read}
    found = {name: each for name, each in hits.items() if each}
    assert found == {} and len(listed) > 500


def test_help_and_version_import_no_verb():
    code = (
        "import sys, sojourn; sys.argv[1:] = [{!r}]\n"
        "try: sojourn.main()\n"
        "except SystemExit: pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith('sojourn.')), file=sys.stderr)\n"
        "print({{'pandas', 'numpy', 'pydantic', 'psutil', 'torch'}} & set(sys.modules), file=sys.stderr)"
    )
    commands = {"cli", "entry", "help_page", "program", "stopped", "verb_group", "verbs"}
    for word, needed in (("--help", commands), ("--version", {"entry", "stopped"})):
        done = subprocess.run([sys.executable, "-c", code.format(word)], cwd=ROOT, capture_output=True, text=True)
        modules, heavy = done.stderr.splitlines()
        loaded = {name.split(".")[2] for name in modules.split() if name.startswith("sojourn.commands.")}
        assert loaded == needed, word
        assert heavy == "set()", heavy


def test_no_verb_s_module_loads_what_only_its_work_needs():
    """So that --help, a wrong option and Ctrl-C are answered at once."""
    names = [verb.function for verb in VERBS]
    code = (
        "import sys; from importlib import import_module\n"
        f"for name in {names}: import_module(f'sojourn.commands.{{name}}')\n"
        "print(*{'pandas', 'numpy', 'pyarrow', 'duckdb', 'psutil', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "\n" and done.stderr == "", done


@pytest.mark.parametrize(
    ("typed", "names"), [("", FIRST_WORDS), ("server ", {"keys", "usage", "quantize", "dashboards", "fleet"})]
)
def test_completion_offers_the_names_of_the_table(typed, names):
    words = f"sojourn {typed}"
    environment = {"_SOJOURN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()))}
    code = (
        "import sys; from sojourn.commands.program import app\ntry: app(prog_name='sojourn')\n"
        "finally: print('sojourn.commands.watch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )
    assert {*done.stdout.split()} == names and done.stderr == "False\n", done.stderr


def test_each_verb_of_the_table_is_there():
    for verb in VERBS:
        command = typer.main.get_command(app)
        for word in verb.name.split():
            command = command.commands[word]
        assert command.name == verb.name.split()[-1] and len(verb.summary) < 60
