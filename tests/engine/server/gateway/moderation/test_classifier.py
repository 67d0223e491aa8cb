"""Classifiers of other packages, found by their entry point."""

import asyncio
import os
import time

import pytest

from sojourn.engine.server.gateway.moderation.classifier import ClassifierModerator
from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed, Verdict
from sojourn.metrics.errors import InputError

CODE = """
import os, time

class Shouting:
    categories = ("shouting", "pid")

    def __init__(self, settings):
        self.weight = settings["weight"]

    def classify(self, text, kind):
        if text == "slow":
            time.sleep(0.5)
        if text == "die":
            os._exit(1)
        if text == "fault":
            raise ValueError("no idea")
        return {"shouting": self.weight * sum(map(str.isupper, text)) / max(1, len(text)), "pid": 0.0}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package as pip installs it, in a folder of its own."""
    (tmp_path / "shouting_site.py").write_text(CODE)
    info = tmp_path / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sojourn.moderators]\nshouting = shouting_site:Shouting\nbroken = shouting_site:Absent\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def moderator(**changed) -> ClassifierModerator:
    settings = {"settings": {"weight": 1.0}, "thresholds": {"shouting": 0.5}} | changed
    return ClassifierModerator("shouts", settings.pop("entry_point", "shouting"), **settings)


async def checked(moderator: ClassifierModerator, *texts: str) -> list[Verdict | ModerationFailed]:
    try:
        return [(await asyncio.gather(moderator.check(text, "input"), return_exceptions=True))[0] for text in texts]
    finally:
        await moderator.close()


def test_a_text_is_flagged_where_its_score_reaches_the_threshold(package):
    verdicts = asyncio.run(checked(moderator(), "QUIET not", "QUIE none", "quiet"))
    assert [verdict.flagged for verdict in verdicts] == [{"shouting"}, set(), set()]
    assert verdicts[0].scores == {"shouting": 5 / 9, "pid": 0.0}


def test_a_slow_or_faulty_classifier_has_no_verdict_and_blocks_no_loop(package):
    begin = time.monotonic()
    slow, fault = asyncio.run(checked(moderator(timeout_seconds=0.1, workers=2), "slow", "fault"))
    assert time.monotonic() - begin < 0.4 and "no verdict in 0.1 s" in str(slow) and "no idea" in str(fault)


def test_a_process_that_dies_is_started_again(package):
    shouts = moderator(run_in="process", timeout_seconds=30)
    died, verdict = asyncio.run(checked(shouts, "die", "LOUD"))
    assert isinstance(died, ModerationFailed) and verdict.flagged == {"shouting"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"entry_point": "absent"}, "'absent' of sojourn.moderators: .*shouting"),
        ({"entry_point": "broken"}, "cannot be loaded"),
        ({"settings": {}}, "cannot be made: KeyError: 'weight'"),
    ],
)
def test_a_classifier_that_cannot_be_made_is_refused(package, changed, says):
    with pytest.raises(InputError, match=says):
        moderator(**changed)
