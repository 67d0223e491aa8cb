from sojourn.triage.page import page
from tests.repository import ROOT


def test_the_page_of_triage_is_of_this_code():
    assert (ROOT / "docs" / "triage.md").read_text(encoding="utf-8") == page(), (
        "write it again: python -m sojourn.triage.page > docs/triage.md"
    )
