"""Published bounds by name, and where they come from."""

import pytest

from sojourn.metrics.request.objectives import OBJECTIVES, parse_bounds, source_of
from sojourn.metrics.request.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_preset_gives_its_bounds_and_names_its_source(name):
    found = parse_bounds(f"preset:{name}")
    assert found and found.keys() <= {*OBJECTIVES} and all(bound > 0 for bound in found.values())
    source = source_of(f"preset:{name}", "--slo")
    assert source == PRESETS[name].source and ("mlcommons/inference" in source or "inference-perf" in source)


def test_bound_beside_a_preset_replaces_its_own_and_the_source_says_so():
    assert parse_bounds("ttft:500 preset:reasoning") == {"ttft_ms": 500, "tpot_ms": 100}
    assert source_of("ttft:500 preset:reasoning", "--slo").endswith("some bounds replaced")
    assert source_of("ttft:500", "--slo") == "--slo"


@pytest.mark.parametrize("text", ["preset:chat", "preset:", "preset:reasoning preset:rag"])
def test_unknown_preset_or_two_are_refused(text):
    with pytest.raises(ValueError, match=r"is no preset; there are interactive-chat|names two presets"):
        parse_bounds(text)
