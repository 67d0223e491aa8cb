"""The C++ kernels, for tests that have the mark `compiler` because they take them."""

import pytest

from sojourn.engine.compute.cpp import extension


@pytest.fixture(scope="session")
def library() -> extension.Library:
    built = extension.library()
    assert built is not None
    return built
