"""Drafters for the random checkpoints."""

from functools import partial

import pytest

from tests.engine.techniques.speculation import drafter_folders


@pytest.fixture(scope="session")
def drafter(checkpoints, tmp_path_factory):
    """Name → settings of an engine that drafts so."""
    root = tmp_path_factory.mktemp("drafters")
    return partial(drafter_folders.settings_of, checkpoints=checkpoints, root=root)
