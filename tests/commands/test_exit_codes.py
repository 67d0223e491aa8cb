"""One rule of exit codes: the table, what --help and docs/commands.md say of it, and the verbs that follow it."""

import ast
from pathlib import Path

import pytest

from sojourn.commands import summary
from sojourn.commands.verbs import VERBS
from sojourn.loadgen.run.replay import ended_with
from sojourn.metrics.exit_codes import OF_VERB, Ended, epilog, table
from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run

ROOT = Path(__file__).parents[2]
INVALID = {"valid": False, "invalid_reasons": ["the load was sent late"]}


def test_docs_and_help_have_the_table():
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert table() in page, "put in what this prints: python -m sojourn.metrics.exit_codes"
    assert set(OF_VERB) <= {verb.name for verb in VERBS}
    for verb in (name for name in OF_VERB if name not in ("locust", "dev ladder", "serve", "bench-serve")):
        shown = " ".join(run_program(*verb.split(), "--help").stdout.split())
        assert " ".join(epilog(verb).split()) in shown, verb


def test_no_verb_has_a_code_of_its_own():
    """Codes of `Ended` only: a number in a verb would be a second rule."""
    found = []
    ends = ("typer.Exit", "sys.exit", "SystemExit", "os._exit")
    locust = (ROOT / "loadgen" / name for name in ("locustfile.py", "tasks/session.py"))
    for file in (*(ROOT / "commands").glob("*.py"), *locust):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ends:
                found += [f"{file.name}: {ast.unparse(node)}" for each in node.args if isinstance(each, ast.Constant)]
            if isinstance(node, ast.FunctionDef) and node.name.endswith("code_of"):
                found += [
                    ast.unparse(each)
                    for each in ast.walk(node)
                    if isinstance(each, ast.Return) and isinstance(each.value, ast.Constant)
                ]
    assert found == []


@pytest.mark.parametrize(("meta", "code"), [({}, Ended.DONE), (INVALID, Ended.NOT_VALID)], ids=["valid", "not valid"])
def test_a_load_locust_and_compare_agree_on_a_run(tmp_path, meta, code):
    """`load && compare`: the second half takes what the first half let through, and refuses what it stopped. The
    verdict on the invalid run is one that its lateness could not change, which made `load` say 0."""
    a, b = (synthetic_run(tmp_path / name, plant="small_batch_cap", requests=20, name=name) for name in "ab")
    b.update_meta(**meta)
    assert summary.summarise(b) == ended_with(b)[0] == code
    compared = run_program("compare", str(a.path), str(b.path)).returncode
    assert (compared == Ended.WRONG_USE) == (code != Ended.DONE), compared
