"""A schema means the same beside tools, in every format of calls, as it means alone: references lead where they led."""

import json

import llguidance
import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.token.checkpoint import tokenizer_source
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.engine.token.tools.calls import FORMATS
from sojourn.engine.token.tools.grammar import Tool, call_grammar
from sojourn.engine.token.tools.schemas import any_of

FOLDER = model_folder("tiny-model")
TOKENIZER = Tokenizer(FOLDER)
LIBRARY = llguidance.LLTokenizer(tokenizer_source(FOLDER), eos_token=2)


def closed(properties, **more):
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


NODE = closed({"kid": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}})
SMALL = {"type": "integer", "minimum": 0, "maximum": 3}
# Name → schema, a value that it allows, and one that it forbids.
SCHEMAS = {
    "$defs": (closed({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": {"enum": ["x"]}}}), {"p": "x"}, {"p": "y"}),
    "definitions": (
        closed({"p": {"$ref": "#/definitions/P"}}, definitions={"P": SMALL}), {"p": 3}, {"p": 4},
    ),
    "$defs that refer to $defs": (
        closed({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": closed({"q": {"$ref": "#/$defs/Q"}}), "Q": SMALL}}),
        {"p": {"q": 1}}, {"p": {"q": "1"}},
    ),
    "itself": (
        closed({"kid": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        {"kid": {"kid": None}}, {"kid": {"name": "t", "parameters": {"z": True}}},
    ),
    "a definition that is recursive": (
        closed({"root": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": NODE}}),
        {"root": {"kid": {"kid": None}}}, {"root": {"kid": {"kid": 1}}},
    ),
    "a reference at the top": (
        {"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, {"kid": {"kid": None}}, {"root": None},
    ),
    "a property": (closed({"a": SMALL, "b": {"$ref": "#/properties/a"}}), {"a": 1, "b": 2}, {"a": 1, "b": 9}),
    "an item of a list": (
        closed({"a": {"anyOf": [{"enum": ["u"]}, SMALL]}, "b": {"type": "array", "items": {"$ref": "#/properties/a"}}}),
        {"a": 1, "b": ["u", 3]}, {"a": 1, "b": ["v"]},
    ),
    "its own name": (
        closed({"kid": {"anyOf": [{"$ref": "https://x.test/tree#/$defs/K"}, {"type": "null"}]}},
               **{"$id": "https://x.test/tree", "$defs": {"K": SMALL}}),
        {"kid": 2}, {"kid": 7},
    ),
    "a property called $ref": (
        closed({"$ref": {"type": "string", "enum": ["#"]}, "const": {"const": {"$ref": "#"}}}),
        {"$ref": "#", "const": {"$ref": "#"}}, {"$ref": "##", "const": {"$ref": "#"}},
    ),
    "a name with signs": (
        closed({"p": {"$ref": "#/$defs/P~1a~0b%20c"}}, **{"$defs": {"P/a~b c": SMALL}}), {"p": 1}, {"p": 9},
    ),
}  # fmt: skip
PLAIN = closed({"z": {"type": "boolean"}})


def takes(source, text):
    matcher = llguidance.LLMatcher(LIBRARY, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar(form, tools, answer):
    answer = json.dumps(answer)
    return call_grammar(FORMATS[form], tools, {}, forced=False, parallel=False, answer=answer).source


def call(form, arguments):
    """A call of the tool `t` as a model of the format writes it."""
    shape, arguments = FORMATS[form], json.dumps(arguments)
    if shape.form == "named":
        inner = shape.header_text.format(name="t") + arguments
    else:
        inner = json.dumps({"name": "t", shape.arguments_key: 0})[:-2] + arguments + "}"
    if shape.form == "list":
        return f"{shape.section}{shape.opener}[{inner}]"
    if shape.bare:
        return inner
    blank = "\n" if shape.form == "object" else ""
    end = shape.before_closer + shape.closer + (shape.between[-1] if shape.section else "")
    return f"{shape.section}{shape.opener}{blank}{inner}{end}"


@pytest.mark.parametrize("form", FORMATS)
def test_references_of_an_answer_and_of_a_tool_lead_where_they_led(form):
    for name, (schema, good, bad) in SCHEMAS.items():
        beside = grammar(form, [Tool("t", PLAIN)], schema)
        assert takes(beside, json.dumps(good)), name
        assert not takes(beside, json.dumps(bad)), name
        assert takes(beside, call(form, {"z": True})), name
        as_tool = grammar(form, [Tool("other", NODE | {"$defs": {"Node": SMALL}}), Tool("t", schema)], PLAIN)
        assert takes(as_tool, call(form, good)), name
        assert not takes(as_tool, call(form, bad)), name
        assert takes(as_tool, '{"z": true}'), name


@pytest.mark.parametrize("form", FORMATS)
def test_two_schemas_with_the_same_names_inside_do_not_meet(form):
    one, two = (closed({"p": {"$ref": "#/$defs/P"}}, **{"$defs": {"P": {"enum": [value]}}}) for value in "xy")
    source = grammar(form, [Tool("t", one)], two)
    assert takes(source, call(form, {"p": "x"})) and takes(source, '{"p": "y"}')
    assert not takes(source, call(form, {"p": "y"})) and not takes(source, '{"p": "x"}')


def test_a_document_inside_a_schema_keeps_its_own_references():
    inner = {"$id": "https://x.test/inner", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": SMALL}}
    whole = any_of({"answer": {"properties": {"in": inner, "out": {"$ref": "#"}}}})
    moved = whole["$defs"]["answer"]["properties"]
    assert moved["in"] == inner and moved["out"] == {"$ref": "#/$defs/answer"}
