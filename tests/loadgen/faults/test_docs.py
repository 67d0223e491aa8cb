"""docs/faults.md has the faults as they are."""

import re

from sojourn.loadgen.faults.document import DOCUMENT, PLACES, renew_tables

TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_its_tables_are_those_of_the_faults():
    assert re.findall(r"<!-- faults: (\w+) -->", TEXT) == list(PLACES)
    assert renew_tables(TEXT) == TEXT, "run `python -m sojourn.loadgen.faults.document`"
    assert "| `slow_host` | `by` (`cpu`, `sleep`), `stage` (`schedule`, `prepare`, `commit`), `ms` | A stage" in TEXT
    assert "\n| `starved_router` | `pause_ms`, `every_ms` | The router" in TEXT
