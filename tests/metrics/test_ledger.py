"""docs/life_of_a_request.md has the accounts as they are."""

from sojourn.metrics.ledger import account_table
from tests.repository import ROOT


def test_the_page_has_the_table_of_accounts():
    page = (ROOT / "docs" / "life_of_a_request.md").read_text(encoding="utf-8")
    table = account_table()
    assert f"\n{table}\n<!-- end -->" in page, "put in what this prints: python -m sojourn.metrics.ledger"
    assert "| `memory.blocked` | waiting for KV blocks |" in table and table.count("\n") == 30
