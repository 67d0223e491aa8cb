"""Servers beside vLLM and SGLang: what their pages show is judged, and what they do not show is said."""

import pytest

from sojourn.interop.sources.registry import SOURCES
from sojourn.live.watch.observer import Observer
from tests.metrics.any_page import SECOND, Life, rows

KEYS = ("llama.cpp", "lmdeploy", "tensorrt-llm", "tgi", "dynamo", "triton", "litellm")
OTHERS = pytest.mark.parametrize("source", [each for each in SOURCES if each.key in KEYS], ids=lambda each: each.key)
LIGHT, LINE = Life(1, 0, 1.0, 0.08, 0.9), Life(4, 30, 3.5, 9.0, 10.0)
COUNTS_NO_ENDS, SHOWS_NO_LINE = ("llama.cpp",), ("litellm",)
NAMES_THE_CAP = ("lmdeploy", "tensorrt-llm")  # they show a queue, a TTFT and the room in the KV cache


def watched(source, life: Life, objectives: dict[str, float] | None = None, seconds: int = 60, frozen: int = 0):
    """`frozen`: how many of the last seconds nothing counts on."""
    observer = Observer("http://x", "x", objectives or {}, 60.0)
    for second in range(seconds + 1):
        moved = min(second, seconds - frozen)
        observer.add(SECOND * (second + 1), rows(source, SECOND * (second + 1), 100 + moved, life))
    return observer.watched()


@OTHERS
def test_nothing_to_do_is_idle(source):
    assert watched(source, Life(0, 0, 0)).state == "idle"


@OTHERS
@pytest.mark.parametrize("objectives", [{}, {"ttft_ms": 500.0}], ids=["plain", "objective"])
def test_a_light_load_is_healthy_where_that_can_be_seen(source, objectives):
    found = watched(source, LIGHT, objectives)
    can = source.key not in (*COUNTS_NO_ENDS, *SHOWS_NO_LINE) and not (
        objectives and not source.translates("sojourn_request_ttft_seconds")
    )
    assert found.state == ("healthy" if can else "cannot tell"), found.headline
    assert not found.findings


@OTHERS
@pytest.mark.parametrize("objectives", [{}, {"ttft_ms": 500.0}], ids=["plain", "objective"])
def test_a_line_is_never_healthy_and_its_cause_is_named_where_the_page_has_it(source, objectives):
    found = watched(source, LINE, objectives)
    assert found.state not in ("healthy", "idle"), found.headline
    if source.key in NAMES_THE_CAP:
        assert found.findings[0].key == "batch_cap", found.headline
    elif source.key == "llama.cpp":
        assert "either the batch is capped" in found.headline
    else:
        assert found.state == "cannot tell" and not found.findings, found.headline


@OTHERS
@pytest.mark.parametrize("life", [LIGHT, LINE], ids=["light", "line"])
def test_what_stands_still_with_requests_in_it_is_stuck(source, life):
    assert watched(source, life, seconds=90, frozen=60).state == "stuck"


@pytest.mark.parametrize("for_grammars", [1.0, 0.0])
def test_a_line_for_grammars_of_sglang_is_no_limit_on_the_batch(for_grammars):
    source = next(each for each in SOURCES if each.key == "sglang")
    observer = Observer("http://x", "x", {}, 60.0)
    for second in range(61):
        page = rows(source, SECOND * (second + 1), 100 + second, LINE)
        for row in page:
            if row["name"] in ("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"):
                is_grammar = "grammar" in row["name"]
                row["value"] = 30.0 * (for_grammars if is_grammar else 1 - for_grammars)
        observer.add(SECOND * (second + 1), page)
    keys = [found.key for found in observer.watched().findings]
    assert keys[0] == ("slow_grammar" if for_grammars else "batch_cap"), keys
