"""Calls in a model's text: found in any pieces, nothing lost, in linear time; and grammars that force them."""

import json
import random
import time
from itertools import pairwise

import llguidance
import llguidance.numpy
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sojourn.engine.config import model_folder
from sojourn.engine.token.tools.calls import FORMATS, ContentDelta, ToolCallParser, format_of
from sojourn.engine.token.tools.grammar import Tool, call_grammar
from tests.further import further

ARGUMENTS = ['{"city": "Graz}", "days": [1, {"a": "]\\""}]}', '{"path": "C:\\\\", "quote": "}\\"{"}']


def written(name: str, *, calls: int = 2, before: str = "") -> str:
    """Calls of f and g as a model of this format writes them."""
    pairs = list(zip("fg"[:calls], ARGUMENTS[:calls], strict=True))
    objects = [f'{{"name": "{f}", "arguments": {a}}}' for f, a in pairs]
    if name == "hermes":
        return before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    if name == "llama3":
        return before + "; ".join(call.replace('"arguments"', '"parameters"') for call in objects)
    if name == "mistral":
        return before + f"[TOOL_CALLS] [{', '.join(objects)}]"
    if name == "mistral_args":
        return before + "".join(f"[TOOL_CALLS]{f}[ARGS]{a}" for f, a in pairs)
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    if name == "deepseek_v3":
        inner = [f"{begin}function<｜tool▁sep｜>{f}\n```json\n{a}\n```{end}" for f, a in pairs]
        return before + f"<｜tool▁calls▁begin｜>{chr(10).join(inner)}<｜tool▁calls▁end｜>"
    inner = [f"{begin}{f}<｜tool▁sep｜>{a}{end}" for f, a in pairs]
    return before + f"<｜tool▁calls▁begin｜>{''.join(inner)}<｜tool▁calls▁end｜>"


def read(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls) of a text that comes in pieces."""
    parser = ToolCallParser(FORMATS[name], {"f", "g"})
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    names, arguments = [], []
    for delta in deltas:
        if not isinstance(delta, ContentDelta):
            if delta.name is not None:
                assert delta.index == len(names)
                names.append(delta.name)
                arguments.append([])
            arguments[delta.index].append(delta.arguments)
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    assert parser.num_calls == len(names)
    return content, [(n, "".join(a)) for n, a in zip(names, arguments, strict=True)]


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_with_their_text_before_them(name):
    assert read(name, [written(name)]) == ("", [("f", ARGUMENTS[0]), ("g", ARGUMENTS[1])])
    if name != "llama3":  # its calls begin the output, unless a token marks them
        assert read(name, [written(name, before="I look.\n")])[0] == "I look.\n"
        assert read(name, [written(name, before="I look.\n")])[1] == [("f", ARGUMENTS[0]), ("g", ARGUMENTS[1])]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40)
@given(
    before=st.sampled_from(["\n", "", "Look: <"]),
    places=st.lists(st.integers(0, 1000), max_size=40),
    end=st.integers(0, 400),
    tail=st.text(max_size=5),
)
def test_pieces_make_no_difference(name, before, places, end, tail):
    text = written(name, before=before)[:end] + tail
    assert read(name, cut(text, places)) == read(name, [text])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60)
@given(
    places=st.lists(st.integers(0, 400), max_size=40),
    slips=st.lists(st.tuples(st.integers(0, 400), st.sampled_from([*'{}[]"\\\\:,<x ', ""])), min_size=1, max_size=3),
)
@example(places=[40], slips=[(22, "z"), (55, "{"), (56, "{")]).via("no function's name, and then an object without end")
def test_pieces_make_no_difference_to_calls_with_slips(name, places, slips):
    text = written(name)
    for at, character in slips:
        text = text[:at] + character + text[at + 1 :]
    assert read(name, cut(text, places)) == read(name, [text])


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", "{", "}", '"', ":", ",", " ", "\n", "\\", "x", "f",
     '"name": "f"', '"arguments": {', "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "[ARGS]", "<|python_tag|>"]
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=80)
@given(parts=st.lists(PARTS, max_size=30))
def test_text_without_a_call_is_content_and_none_of_it_is_lost(name, parts):
    text = "".join(parts)
    content, calls = read(name, parts)
    if not calls:
        assert content == text
    else:  # all that is neither white space nor a call's own notation is there, in order
        for kept in (content, *(arguments for _, arguments in calls)):
            assert kept in text or all(word in text for word in kept.split())


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> x', None),
        ('<tool_call>\n{"name": "f", "arguments": "{}"}\n</tool_call>', None),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', None),
        ('<tool_call>{"name": "f", "name": "g", "arguments": {}}', None),
        ('<tool_call>{"name": "f", "argu', None),
        ("a <tool_ca", None),
        ('<tool_call><tool_call>{"id": 7, "arguments": {}, "name": "f"}</tool_call>and', "<tool_call>and"),
    ],
)
def test_what_is_no_call_after_all_is_content(text, content):
    assert read("hermes", [text])[0] == (text if content is None else content)
    assert read("hermes", list(text))[0] == (text if content is None else content)


def test_a_call_that_the_limit_cuts_off_keeps_its_arguments_so_far():
    assert read("hermes", ['<tool_call>{"name": "f", "arguments": {"a": [1']) == ("", [("f", '{"a": [1')])


HOSTILE = {
    "hermes": ["(", "<tool_call>", '<tool_call>{"a', '<tool_call>{"a":"\\'],
    "llama3": ["{", ";"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][ "],
    "mistral_args": ["[TOOL_CALLS]", " "],
    "deepseek_v3": ["<｜tool▁call▁begin｜>"],
}


@pytest.mark.parametrize("name", ["deepseek_v3", *further("hermes", "llama3", "mistral", "mistral_args")])
def test_a_megabyte_of_openers_takes_linear_time(name):
    def seconds(unit: str, characters: int) -> float:
        text = unit * (characters // len(unit))
        pieces = [text[at : at + 50] for at in range(0, len(text), 50)]
        begin = time.process_time()
        content, calls = read(name, pieces)
        spent = time.process_time() - begin
        assert content == text and not calls
        return spent

    for unit in HOSTILE[name]:  # eight times the text: linear work takes 8 times as long, quadratic 64 times
        small = seconds(unit, 125_000)
        # A busy machine makes one turn slow, quadratic work makes all of them so.
        assert any(seconds(unit, 1_000_000) < 20 * small + 0.3 for _ in range(4)), (unit, small)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>\n{{ x }}\n</tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", "mistral"),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}{% endif %}", "mistral_args"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json", "deepseek_v3"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>", "deepseek_v31"),
        ("""{{ tools }}{% if message.role == "ipython" %}{"name": "f", "parameters": {{ a }} }""", "llama3"),
        ("{% for message in messages %}<tool_call>{% endfor %}", None),
        ("{{ tools }}<tool_call><function=f><parameter=a>", None),
        ("{{ tools }}", None),
    ],
)
def test_the_template_tells_the_format(template, name):
    assert format_of(template) == (FORMATS[name] if name else None)


SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["km", "mi"]}},
    "required": ["count"],
    "additionalProperties": False,
}
TOOLS = [Tool("f", SCHEMA, strict=True), Tool("g", {"properties": {"yes": {"type": "boolean"}}, "required": ["yes"]})]
TOKENIZER = (model_folder("tiny-model") / "tokenizer.json").read_text(encoding="utf-8")


def tokenizer_with(literals: list[str]) -> tuple[str, dict[str, int]]:
    """The bundled tokenizer, with some literals as special tokens."""
    described = json.loads(TOKENIZER)
    ids = {literal: len(described["model"]["vocab"]) + index for index, literal in enumerate(literals)}
    keys = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"] += [{"id": i, "content": c, "special": True, **keys} for c, i in ids.items()]
    return json.dumps(described), ids


def outputs(described: str, source: str, num: int) -> list[str]:
    """Outputs of a model that knows nothing and obeys a grammar."""
    tokenizer = llguidance.LLTokenizer(described, eos_token=2)
    texts, mask = [], llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)
    for seed in range(num):
        matcher, chance, ids = llguidance.LLMatcher(tokenizer, source), random.Random(seed), []
        assert not matcher.is_error(), matcher.get_error()
        while not matcher.is_stopped():
            llguidance.numpy.fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
            token = 2 if 2 in allowed and chance.random() < 0.7 else int(chance.choice(allowed))
            assert matcher.consume_token(token)
            ids.append(token)
        texts.append(Tokenizer.from_str(described).decode([i for i in ids if i != 2], skip_special_tokens=False))
    return texts


@pytest.mark.parametrize("special", [False, *further(True)], ids=["text", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_valid_even_from_a_model_that_knows_nothing(name, special):
    form = FORMATS[name]
    literals = [x for x in dict.fromkeys((form.opener, form.closer, form.section, *form.marks)) if x and special]
    described, ids = tokenizer_with(literals)
    several = 0
    for parallel in (False, True):
        grammar = call_grammar(form, TOOLS, ids, forced=True, parallel=parallel)
        for text in outputs(described, grammar.source, 8 if parallel else 3):
            content, calls = read(name, [text])
            assert content == "" and calls and (parallel or len(calls) == 1), text
            several += len(calls) > 1
            for called, arguments in calls:
                values = json.loads(arguments)
                assert type(values["count" if called == "f" else "yes"]) is (int if called == "f" else bool)
                assert called == "g" or set(values) <= {"count", "unit"}
    assert several


def accepted(source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(TOKENIZER, eos_token=2), source)
    ids = Tokenizer.from_str(TOKENIZER).encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_that_allows_text_still_holds_calls_to_their_schema(name):
    form = FORMATS[name]
    grammar = call_grammar(form, TOOLS, {}, forced=False, parallel=False)
    call = outputs(TOKENIZER, call_grammar(form, TOOLS[:1], {}, forced=True, parallel=False).source, 1)[0]
    wrong = call.replace('"count": ', '"count": "')
    source = grammar.source
    assert accepted(source, "Just text.") and accepted(source, call) and not accepted(source, wrong)
    assert name == "llama3" or accepted(source, "Text.\n" + call)
    assert name == "llama3" or not accepted(source, call + form.opener)


@pytest.mark.parametrize("name", FORMATS)
def test_a_schema_for_the_answer_leaves_both_ways_open(name):
    form, schema = (
        FORMATS[name],
        '{"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}',
    )
    source = call_grammar(form, TOOLS, {}, forced=False, parallel=True, answer=schema).source
    call = outputs(TOKENIZER, call_grammar(form, TOOLS[:1], {}, forced=True, parallel=False).source, 1)[0]
    for text, good in (
        (call, True),
        ('{"sunny": true}', True),
        (call[:-2], False),
        ('{"sunny": 1}', False),
        ("Text.", False),
    ):
        assert accepted(source, text) == good
