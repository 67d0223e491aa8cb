"""Tests of the probe with its peers take prompts from the tests of the probe, which put its folder on the path."""

import tests.probe.conftest  # noqa: F401
