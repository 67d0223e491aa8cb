"""`sojourn server usage`: rows, totals, and sentences for what cannot be."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.metrics.errors import SojournError
from sojourn.metrics.usage.record import End
from tests.metrics.usage.test_reader import kill, record, writer
from tests.metrics.usage.test_report import LIST


@pytest.fixture
def folder(tmp_path):
    server = writer(tmp_path / "run" / "usage")
    for number, tenant in enumerate(["acme", "acme", "[red]"]):
        server.write(End(record(server.life, number, tenant=tenant, status="answered", model="tiny-model",
                                output_tokens=10 * number)))  # fmt: skip
    kill(server)
    (tmp_path / "prices.yaml").write_text(LIST)
    return tmp_path / "run"


def usage(*arguments) -> str:
    done = CliRunner().invoke(app, ["server", "usage", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_rows_and_totals_as_a_table_json_and_csv(folder):
    table = usage(folder)
    assert "[red]" in table and "acme" in table and "3 calls: 3 answered" in table
    document = json.loads(usage(folder, "--json", "--prices", folder.parent / "prices.yaml"))
    assert [row["group"] for row in document["rows"]] == ["[red]", "acme"]
    assert document["total"]["output_tokens"] == 30 and document["total"]["price_of_tokens"] == "0.0000111"
    rows = list(csv.DictReader(io.StringIO(usage(folder, "--csv", "--by", "status"))))
    assert [(row["status"], row["answered"], row["prompt_tokens"]) for row in rows] == [("answered", "3", "21")]


def test_a_span_without_calls_has_no_rows(folder):
    assert "no calls arrived" in usage(folder, "--since", "2027-01-01")
    (heading,) = usage(folder, "--until", "2020-01-01", "--csv").splitlines()
    assert heading.startswith("tenant,answered,failed,cancelled,refused,interrupted,open,calls,prompt_tokens")


@pytest.mark.parametrize(("arguments", "says"), [
    (["none"], "is not a folder"), (["--json", "--csv"], "exclude each other"), (["--since", ""], "is no time"),
    (["--prices", "none.yaml"], "cannot be read"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_a_sentence(folder, monkeypatch, arguments, says):
    monkeypatch.chdir(folder)
    with pytest.raises(SojournError, match=says):
        usage(*arguments)
