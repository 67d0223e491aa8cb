"""The tests that `make check` leaves out because a case of them takes long: `long_tests.txt`. `--note-long` writes it
from what a run of all tests takes; that machine should be quiet. A new test is not in it."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
LONG_SECONDS = 0.1


def name_of(node_id: str) -> str:
    """Without its parameters."""
    return node_id.partition("[")[0]


def without_long(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(the others, the long ones)"""
    long = set(LIST.read_text(encoding="utf-8").splitlines())
    halves: tuple[list, list] = ([], [])
    for item in items:
        halves[name_of(item.nodeid) in long].append(item)
    return halves


def note_long(reports: Iterable[pytest.TestReport]) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        seconds[report.nodeid] += report.duration
    long = {name_of(node_id) for node_id, spent in seconds.items() if spent >= LONG_SECONDS}
    LIST.write_text("".join(f"{name}\n" for name in sorted(long)), encoding="utf-8")
