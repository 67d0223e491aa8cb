"""Structured output as clients ask for it: what comes is what was asked for, and what is too much is refused."""

import asyncio
import json
import re

import httpx
import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.sampling import Grammar
from sojourn.engine.server.openai.structured_output import choice
from sojourn.engine.techniques.grammar.checks import GrammarChecks
from tests.engine.server_process import post, serving
from tests.engine.techniques.grammar.test_grammar import PERSON, is_person

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("structured"), "tiny-model", "--max-model-len", "1024") as running:
        yield running


def chat(server, **body):
    message = {"role": "user", "content": "Tell me about a person."}
    defaults = {"messages": [message], "max_tokens": 300, "temperature": 1.5, "seed": 3}
    return httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny-model"} | defaults | body, timeout=60)


def schema(of: dict, **more) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": of, "strict": True} | more}


def test_openai_python_gets_what_its_schema_says(server):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    message = [{"role": "user", "content": "Who?"}]
    common = {"model": "tiny-model", "messages": message, "temperature": 1.2, "max_tokens": 400}
    answer = client.chat.completions.create(**common, n=3, seed=1, response_format=schema(PERSON), logprobs=True)
    stopped = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert stopped and all(is_person(choice.message.content) for choice in stopped)
    assert all(choice.logprobs.content for choice in answer.choices)
    small = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
             "additionalProperties": False}  # fmt: skip
    stream = client.chat.completions.create(**common, seed=2, stream=True, response_format=schema(small))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert json.loads(text)["ok"] in (True, False)
    answer = client.chat.completions.create(**common, seed=5, response_format={"type": "json_object"})
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


EXTRAS = [
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"regex": "[xyz]{5}"}}, "[xyz]{5}"),
    ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")+ "d"'}}, "a[bc]+d"),
    ({"structured_outputs": {"json": {"enum": [7, "e"]}}}, '7|"e"'),
    ({"structured_outputs": {"json_object": True, "regex": None}}, r"(?s)\{.*\}"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_regex": "[xyz]{5}"}, "[xyz]{5}"),
    ({"guided_json": '{"const": 1}'}, "1"),
    ({"guided_json": {"const": 1}}, "1"),
    ({"guided_grammar": 'start: "go"'}, "go"),
    ({"response_format": {"type": "text"}, "structured_outputs": {"choice": ["left"]}}, "left"),
]


@pytest.mark.parametrize(("fields", "pattern"), EXTRAS, ids=str)
def test_every_way_to_ask_is_honoured_by_both_endpoints(fields, pattern, server):
    for path in ("/v1/completions", "/v1/chat/completions"):
        asked = post(server, temperature=1.5, seed=2, max_tokens=200, **fields) if path == "/v1/completions" else chat(
            server, **fields
        )  # fmt: skip
        assert asked.status_code == 200, asked.text
        choice = asked.json()["choices"][0]
        text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, text), text


def deep(levels: int) -> dict:
    of: dict = {"type": "string"}
    for _ in range(levels):
        of = {"type": "object", "properties": {"a": of}, "required": ["a"]}
    return of


REFUSED = {
    "no type": ({"response_format": {}}, "response_format"),
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format"),
    "schema is a list": ({"response_format": schema([])}, "response_format"),
    "bad name": ({"response_format": schema({}, name="a b")}, "response_format"),
    "unknown member": ({"response_format": schema({}, more=1)}, "response_format"),
    "two ways": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "two ways in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    "no way in one": ({"structured_outputs": {}}, "structured_outputs"),
    "empty choice": ({"guided_choice": []}, "guided_choice"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    "stop_token_ids": ({"guided_regex": "a", "stop_token_ids": [5]}, "stop_token_ids"),
    "invalid type": ({"response_format": schema({"type": "strin"})}, "response_format"),
    "type is a number": ({"response_format": schema({"type": 5})}, "response_format"),
    "endless reference": ({"response_format": schema({"$ref": "#"})}, "response_format"),
    "references in a circle": (
        {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        "guided_json",
    ),
    "remote reference": ({"guided_json": {"$ref": "http://x/y.json"}}, "guided_json"),
    "unimplemented": ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    "schema is no JSON": ({"guided_json": "{"}, "guided_json"),
    "300 deep": ({"response_format": schema(deep(300))}, "response_format"),
    "20,000 values": (
        {"response_format": schema({"enum": [f"value number {i}" for i in range(20_000)]})}, "response_format",
    ),
    "twenty patterns at once": (
        {"guided_json": {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}}, "guided_json",
    ),
    "a large multiple": ({"guided_json": {"type": "integer", "multipleOf": 999_983}}, "guided_json"),
    "a wide range": ({"guided_json": {"type": "number", "minimum": 1.23456e-300, "maximum": 9.87e300}}, "guided_json"),
    "3,000 properties": (
        {"guided_json": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}},
        "guided_json",
    ),
    "open brackets": ({"guided_regex": "(" * 1000}, "guided_regex"),
    "1 MB of brackets": ({"guided_regex": "(" * 1_000_000}, "guided_regex"),
    "1 MB of regex": ({"guided_regex": "a" * 1_000_000}, "guided_regex"),
    "60 kB of brackets": ({"guided_regex": "(" * 60_000}, "guided_regex"),
    "1 MB of Lark": ({"guided_grammar": "start: " + '"a" ' * 250_000}, "guided_grammar"),
    "Lark in a circle": ({"guided_grammar": "start: a\na: b\nb: a\n"}, "guided_grammar"),
    "no such special token": ({"guided_grammar": "start: <|nowhere|>"}, "guided_grammar"),
    "1 MB of choice": ({"guided_choice": ["x" * 1000] * 1000}, "guided_choice"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name_and_the_next_is_answered(name, server):
    fields, param = REFUSED[name]
    answer = post(server, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(error["message"]) < 600
    assert post(server, guided_choice=["fine"]).json()["choices"][0]["text"] == "fine"


HARMLESS = {
    "long lists of long texts": {
        "guided_json": {"type": "array", "maxItems": 10_000, "items": {"type": "string", "maxLength": 10_000}}
    },
    "a huge repetition": {"guided_regex": "a{4000000}"},
    "nested quantifiers": {"guided_regex": "((((a+)+)+)+)+b"},
    "recursion": {"guided_json": {"type": "object", "properties": {"x": {"$ref": "#"}}, "additionalProperties": False}},
    "NUL": {"guided_json": {"const": "a\0b"}},
    "NUL in a regex": {"guided_regex": "a\0b"},
    "40 deep": {"response_format": schema(deep(40))},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_hostile_is_answered(name, server):
    answer = post(server, max_tokens=20, temperature=0, **HARMLESS[name])
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_grammar_that_becomes_too_large_ends_its_request_and_no_other(server):
    """Its first step is cheap; somewhere within the output llguidance meets its own limits."""
    regex = "(((a{1,50}){1,50}){1,50}){1,50}"
    answers = [post(server, max_tokens=20, temperature=1.0, seed=i, guided_regex=regex) for i in range(6)]
    for answer in answers:
        if answer.status_code == 200:
            assert set(answer.json()["choices"][0]["text"]) == {"a"}
        else:
            assert answer.status_code == 400 and "grammar" in answer.json()["error"]["message"], answer.text
    assert {answer.status_code for answer in answers} <= {200, 400}
    assert post(server, guided_choice=["fine"]).json()["choices"][0]["text"] == "fine"


def test_a_verdict_is_remembered_with_its_sentence(server):
    answers = [post(server, guided_json={"type": "strin"}).json() for _ in range(2)]
    assert answers[0] == answers[1] and "strin" in answers[0]["error"]["message"]


def hostile() -> Grammar:
    """Takes all the time that a check may take."""
    of = {"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(20)]}
    return Grammar("json_schema", json.dumps(of))


def checking(use) -> None:
    async def run() -> None:
        checks = GrammarChecks(model_folder("tiny-model"))
        checks.start()
        try:
            await checks.check(choice(["fine"]), "guided_choice")
            await use(checks)
        finally:
            await checks.stop()
        assert not checks._starting and all(process.returncode is not None for process in checks._processes)

    asyncio.run(run())


def test_many_who_ask_for_one_grammar_at_once_wait_for_one_verdict():
    async def use(checks: GrammarChecks) -> None:
        asked = [checks.check(hostile(), "guided_json") for _ in range(300)]
        answers = await asyncio.gather(*asked, checks.check(choice(["good"]), "guided_choice"), return_exceptions=True)
        assert {getattr(answer, "status", None) for answer in answers[:-1]} == {400} and answers[-1] is None

    checking(use)


def test_who_leaves_while_a_grammar_is_checked_costs_no_process():
    async def use(checks: GrammarChecks) -> None:
        workers = set(checks._processes)
        left = [asyncio.create_task(checks.check(hostile(), "guided_json")) for _ in range(3)]
        while checks._idle.qsize() == len(checks._processes):
            await asyncio.sleep(0.001)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await checks.check(choice(["next"]), "guided_choice")
        assert workers <= checks._processes and all(process.returncode is None for process in workers)

    checking(use)
