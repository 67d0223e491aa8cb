"""The page of --help: nothing of it is cut at 80 columns, and every name stands whole on one line."""

import re

import pytest
import typer

from sojourn.commands.program import app
from sojourn.commands.verbs import VERBS

GROUP = typer.main.get_command(app)
OWN_PARSERS = {verb.name.split()[-1] for verb in VERBS if verb.has_own_parser}  # Locust's ends the process, too


def verbs(group=GROUP, path=()):
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            yield from verbs(verb, (*path, name))
        elif name not in OWN_PARSERS:
            yield (*path, name), verb


def page(path, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        app([*path, "--help"], prog_name="sojourn")
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 200])
def test_every_page_names_all_options_whole_and_in_the_width(columns, monkeypatch, capsys):
    for path, verb in [((), GROUP), *verbs()]:
        shown = page(path, columns, monkeypatch, capsys)
        assert "…" not in shown and max(map(len, shown.splitlines())) <= min(columns, 110), path
        for param in verb.params:
            if getattr(param, "hidden", False) or param.param_type_name == "argument":
                continue
            for name in (*param.opts, *param.secondary_opts):
                assert re.search(rf"^  (-.*, )?{re.escape(name)}\b", shown, re.MULTILINE), (path, name)


def test_a_value_has_a_name_and_bounds_are_words(monkeypatch, capsys):
    serve = page(("serve",), 80, monkeypatch, capsys)
    assert "--max-num-batched-tokens TOKENS\n" in serve and "--kv-disk-gib GiB " in serve
    assert (
        "--prefix-caching, --no-prefix-caching\n" in serve
        and "--otlp-metrics, --no-otlp-metrics\n" in serve
        and "--policy CHOICE" in serve
    )
    run = " ".join(page(("run",), 80, monkeypatch, capsys).split())
    assert "--processes N processes of the load generator that share the schedule [default: 1; 1 to 64]" in run
    assert "[0.01 to 0.999]" in run and "--stop-when-resolved SHARE" in run
    assert "Usage: sojourn run [OPTIONS] [SCENARIO]" in run
