"""A plugin of pytest: notes every diagnosis, live verdict and prediction that the tests bring about.

    GOLDEN_FOLDER=FOLDER python -m pytest -p tests.golden.plugin ...

Each process writes one file there: test → digests of what was said, in order.
"""

import json
import os
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import sojourn.diagnosis.diagnose as diagnosis
import sojourn.live.watch.verdict as live
from sojourn.replay.predictor import ReplayPredictor
from tests.golden.canonical import canonical, digest

_said: dict[str, list[str]] = defaultdict(list)
_test: list[str] = [""]


def _note(owner: Any, name: str) -> None:
    """Before any test imports it: what asks for `name` later gets the one that takes notes."""
    work = getattr(owner, name)

    @wraps(work)
    def noted(*arguments: Any, **options: Any) -> Any:
        result = work(*arguments, **options)
        _said[_test[0]].append(digest(canonical({name: result})))
        return result

    setattr(owner, name, noted)


_note(diagnosis, "diagnose")
_note(live, "verdict")
_note(ReplayPredictor, "predict")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _test[0] = item.nodeid


def pytest_sessionfinish() -> None:
    folder = Path(os.environ["GOLDEN_FOLDER"])
    (folder / f"{os.getpid()}.json").write_text(json.dumps(_said))
