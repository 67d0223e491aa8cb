"""An application for all tests of a file that leave its core alive."""

import pytest

from tests.engine.server.core.own_application import SharedApplication


@pytest.fixture(scope="module")
def application(tmp_path_factory):
    shared = SharedApplication(tmp_path_factory.mktemp("application"))
    yield shared
    shared.close()
