"""Prompts with one thing wrong each, and the finding that says so; prompts with nothing wrong, and none."""

import json

import numpy as np

from sojourn.metrics.memory.prompt_lint.finding import severity_of
from sojourn.metrics.memory.prompt_lint.lint import LintedPrompt, lint_prompts

DICE = np.random.default_rng(3)


def drawn(num_tokens: int) -> list[int]:
    return DICE.integers(0, 50_000, num_tokens).tolist()


def keys(prompts: list[LintedPrompt], block_size: int = 16, count=None) -> list[str]:
    return [finding.key for finding in lint_prompts(prompts, block_size, count)[1]]


def of(*token_ids: list[int]) -> list[LintedPrompt]:
    return [LintedPrompt("chat", "", ids) for ids in token_ids]


def texts(*contents: str) -> list[LintedPrompt]:
    return [LintedPrompt("chat", text, list(text.encode())) for text in contents]


def test_a_common_part_behind_something_that_differs_is_in_the_wrong_order():
    part = drawn(160)
    reports, (finding,) = lint_prompts(of(*([*drawn(20), *part, *drawn(20)] for _ in range(10))), 16)
    assert (finding.key, finding.severity, finding.subject) == ("prompt_order", "high", "class chat")
    assert finding.tokens == 8 * 160 and finding.share == finding.tokens / (10 * 200)
    assert reports[0].infinite_share == 0 and reports[0].movable_share == finding.share


def test_the_same_part_at_the_beginning_is_shared_and_nothing_is_found():
    part = drawn(160)
    (report,), findings = lint_prompts(of(*([*part, *drawn(40)] for _ in range(10))), 16)
    assert findings == []
    assert report.common_prefix_tokens == 160
    assert report.shared_share == report.infinite_share == 9 * 160 / 2000


def test_a_shared_prefix_below_a_block_names_the_block_size_that_catches_it():
    part = drawn(24)
    _, (finding,) = lint_prompts(of(*([*part, *drawn(16)] for _ in range(10))), 32)
    assert finding.key == "sub_block" and "block_size=8 " in finding.fix
    assert finding.tokens == 9 * 24
    assert keys(of(*([*part, *drawn(16)] for _ in range(10))), block_size=8) == []


def test_classes_are_reported_apart_and_share_with_each_other():
    part = drawn(64)
    prompts = [LintedPrompt("a", "", [*part, *drawn(8)]), LintedPrompt("b", "", [*part, *drawn(8)])]
    first, second = lint_prompts(prompts, 16)[0]
    assert (first.klass, first.shared_share, first.common_prefix_tokens) == ("a", 0.0, None)
    assert (second.klass, second.infinite_share) == ("b", 64 / 72)


def test_text_that_a_tokenizer_cuts_into_bytes_is_dense():
    russian = "Глубина гавани двенадцать метров при отливе. " * 4
    (report,), (finding,) = lint_prompts(texts(russian), 16, count=lambda text: len(text.encode()))
    assert finding.key == "dense_text" and "Cyrillic" in finding.says
    assert report.texts[0].kind == "prose, Cyrillic" and report.texts[0].characters_per_token < 0.6
    assert keys(texts(russian), count=lambda text: len(text.encode()) // 4) == []


def test_json_with_blanks_is_told_what_it_would_spare():
    value = {"rows": [{"id": number, "name": f"row {number}"} for number in range(20)]}
    spaced, short = json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))
    prompts = [LintedPrompt("chat", text, [number] * len(text)) for number, text in enumerate((spaced, short))]
    findings = lint_prompts(prompts[:1], 16, count=lambda text: max(1, len(text) // 3))[1]
    assert [finding.key for finding in findings] == ["json_blanks"]
    assert findings[0].tokens == len(spaced) // 3 - len(short) // 3
    assert keys(prompts[1:], count=lambda text: max(1, len(text) // 3)) == []


def test_what_costs_less_than_a_hundredth_is_not_told():
    assert [severity_of(share) for share in (0.5, 0.1, 0.02, 0.009)] == ["high", "medium", "low", None]
