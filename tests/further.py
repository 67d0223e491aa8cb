"""Parameters that repeat a claim: `make thorough` takes them, the other tests the first ones alone."""

import pytest


def further(*values) -> list:
    """Values with the mark `thorough`; a tuple is the values of several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough) for value in values
    ]
