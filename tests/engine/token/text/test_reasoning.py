"""Reasoning in a text: found in any pieces, nothing lost but markers and white space; and grammars behind it."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.sampling import Grammar
from sojourn.engine.techniques.grammar.grammar import GrammarCompiler
from sojourn.engine.token.text.reasoning import FORMATS, Reasoning, ReasoningParser, format_of
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer
from tests.engine.token.tools.test_calls import cut

NAMES = sorted(FORMATS)


def read(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(reasoning)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def free(name: str) -> Reasoning:
    return Reasoning(FORMATS[name], FORMATS[name].implied)


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_stands_before_the_answer(name):
    opener, closer = FORMATS[name].opener, FORMATS[name].closer
    text = f"\n{opener}\nWell,\n\nso. \n{closer}\n\n An answer with {closer} in it.\n"
    assert read(free(name), [text]) == ("Well,\n\nso.", f"An answer with {closer} in it.\n")
    opened = Reasoning(FORMATS[name], is_open=True)
    assert read(opened, [text.replace(opener, "", 1)]) == read(opened, [text]) == read(free(name), [text])


@pytest.mark.parametrize("name", NAMES)
def test_an_output_without_a_marker_is_an_answer_unless_the_family_implies_it(name):
    text = " An answer, with a < and a marker later: " + FORMATS[name].opener
    told = read(free(name), [text])
    assert told == ((text.strip(), "") if FORMATS[name].implied else ("", text))


def test_what_is_cut_off_inside_is_reasoning():
    assert read(free("think"), ["<think>\nIt is </thi"]) == ("It is </thi", "")
    assert read(free("think"), ["<thin"]) == ("", "<thin") and read(free("think"), [" \n"]) == ("", " \n")
    assert read(free("think"), ["<think>\n\n</think>\n\n"]) == ("", "")


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/think>", " ", "\n\n", "a", "</", "<thin", "[THINK]", "Here is my "]),
    max_size=20,
)


@pytest.mark.parametrize("is_open", [False, True])
@settings(max_examples=150)
@given(parts=PARTS, places=st.lists(st.integers(0, 200), max_size=30))
def test_pieces_make_no_difference_and_nothing_is_lost(is_open, parts, places):
    text, reasoning = "".join(parts), Reasoning(FORMATS["think"], is_open)
    whole = read(reasoning, [text])
    assert read(reasoning, cut(text, places)) == whole
    words = re.sub(r"\s", "", text)
    told = [re.sub(r"\s", "", part) for part in whole]
    assert words in {opener + told[0] + closer + told[1] for opener in ("", "<think>") for closer in ("", "</think>")}


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_tokens_of_reasoning_are_those_up_to_the_end_of_its_closer(sizes):
    text = "<think>" + "Let me see. " * 4 + "</think>\n\nSo it is."
    offsets = [sum(sizes[:n]) for n in range(len(sizes)) if sum(sizes[:n]) < len(text)]
    parser = ReasoningParser(Reasoning(FORMATS["think"], is_open=False))
    for begin, end in zip(offsets, [*offsets[1:], len(text)], strict=True):
        parser.push(text[begin:end])
    assert parser.tokens(offsets) == sum(offset < text.index("</think>") + 8 for offset in offsets)
    plain = ReasoningParser(Reasoning(FORMATS["think"], is_open=False))
    plain.push("An answer")
    assert plain.tokens([0, 2, 5]) == 0


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if enable_thinking %}<think>\n\n</think>{% endif %}", "think"),
        ("{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("<seed:think></seed:think>", "seed"),
        ("◁think▷◁/think▷", "kimi"),
        ("[THINK][/THINK]", "magistral"),
        ("Here is my thought process: ... Here is my response:", "granite"),
        ("{{ messages }}", None),
        ("[INST]", None),
    ],
)
def test_the_template_shows_the_format(tmp_path, template, name):
    found = format_of(template)
    assert (found and found.name) == name
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert ChatTemplate(tmp_path).reasoning_format == found
    if name is not None:
        assert EngineConfig(model="x", reasoning_format=name).reasoning_format == name


def test_only_the_end_of_the_prompt_says_how_the_output_begins():
    think = FORMATS["think"]
    assert think.after("user: <think>\nassistant:\n") == Reasoning(think, is_open=False)
    assert think.after("assistant:\n<think>\n") == Reasoning(think, is_open=True)
    assert think.after("assistant:\n<think>\n\n</think>\n\n") is None
    assert think.after("<think>\nSo", continues=True) == Reasoning(think, is_open=True)
    assert think.after("<think>\nSo</think>It", continues=True) is None
    assert FORMATS["deepseek_r1"].after("assistant:") == Reasoning(FORMATS["deepseek_r1"], is_open=True)


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(model_folder("tiny-model"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def follows(compiler: GrammarCompiler, grammar: Grammar, ids: list[int]) -> int:
    """How many of the ids the grammar takes; one more if the output may end there."""
    guide, mask = compiler.compile(grammar), np.zeros(compiler.vocab_size // 32 + 1, dtype=np.int32)
    for count, token in enumerate(ids):
        guide.fill(mask[: guide.words], [2])
        if not mask[token // 32] >> (token % 32) & 1:
            return count
        guide.consume(token, [2])
    return len(ids) + guide.may_end


@pytest.mark.parametrize("is_token", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_a_grammar_holds_behind_the_reasoning_only(compiler, is_token, is_open, kind):
    tokenizer = Tokenizer(model_folder("tiny-model"))
    # Two special tokens of the bundled tokenizer stand for markers that are one token.
    added = {"<think>": 1, "</think>": 3} if is_token else {}
    marker = {name: [added[name]] if is_token else tokenizer.encode(name) for name in ("<think>", "</think>")}
    reasoning = Reasoning(FORMATS["think"], is_open)
    grammar = {
        "json_schema": Grammar("json_schema", json.dumps(SCHEMA), reasoning.grammar_head(added)),
        "regex": Grammar("regex", r'\{"a": [0-9]\}', reasoning.grammar_head(added)),
        "lark": Grammar("lark", 'start: "{" rest\nrest: "\\"a\\": 1}"', reasoning.grammar_head(added)),
    }[kind]
    opener = [] if is_open else marker["<think>"]
    ids = [*opener, *tokenizer.encode("Well }{ so"), *marker["</think>"], *tokenizer.encode('\n\n{"a": 1}')]
    assert follows(compiler, grammar, ids) == len(ids) + 1
    alone = tokenizer.encode('{"a": 1}')
    assert (follows(compiler, grammar, alone) == len(alone) + 1) is not is_open
    other = [*opener, *marker["</think>"], *tokenizer.encode("no")]
    assert follows(compiler, grammar, other) == len(opener) + len(marker["</think>"])


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_closes_the_reasoning(compiler, budget):
    tokenizer, added = Tokenizer(model_folder("tiny-model")), {"</think>": 3}
    head = Reasoning(FORMATS["think"], is_open=True).grammar_head(added, budget)
    grammar = Grammar("lark", "start: /(?s:.*)/", head)
    words = tokenizer.encode("hello there how are you doing now")
    assert len(words) > 6 and follows(compiler, grammar, words) == budget
    ids = [*words[:budget], 3, *words]
    assert follows(compiler, grammar, ids) == len(ids) + 1
