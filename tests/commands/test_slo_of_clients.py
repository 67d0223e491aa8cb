"""`--slo ttfa:…` of every verb that takes objectives: judged where clients saw it, refused in a sentence elsewhere."""

import pytest
import typer
from click import Context

from sojourn.commands.program import app
from tests.commands.program import run_program
from tests.metrics.synthetic import synthetic_run

SLO = ("--slo", "ttfa:2s")
ACCEPT = {"load", "run", "capacity", "dev ladder"}  # they measure it: a load of their own
REFUSE = {
    "watch": ("127.0.0.1:1", "--once"), "record": ("--base-url", "127.0.0.1:1"), "triage": ("run.json",),
    "server dashboards": (), "server dashboards up": (), "import": ("run.json",),
    "size": ("llama-3.1-8b", "steady-chat", "--device", "h200_sxm"), "diagnose": ("run",),
    "report": ("run",), "replay": ("run",), "plan": ("run",),
}  # fmt: skip


def verbs_with_slo(command, words: tuple[str, ...] = ()) -> set[str]:
    found = {" ".join(words)} if any("--slo" in getattr(each, "opts", ()) for each in command.params) else set()
    if hasattr(command, "list_commands"):
        for name in command.list_commands(Context(command)):
            found |= verbs_with_slo(command.get_command(Context(command), name), (*words, name))
    return found


def test_every_verb_that_takes_objectives_is_in_one_of_the_two():
    assert verbs_with_slo(typer.main.get_command(app)) == ACCEPT | {*REFUSE}


@pytest.mark.parametrize("verb", REFUSE)
def test_a_verb_without_the_first_answer_refuses_a_bound_of_it(tmp_path, verb):
    synthetic_run(tmp_path / "run")
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    done = run_program(*verb.split(), *REFUSE[verb], *SLO, cwd=tmp_path)
    assert done.returncode == 2 and "time to first answer token" in " ".join(done.stderr.split()), done
