"""Whatever a body holds: an answer or a 400 that names a field of it; never a fault of ours, never a hang."""

import asyncio
import json
import re
import socket
from collections.abc import Mapping

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.config import model_folder
from sojourn.engine.server.api_reference import BODIES
from sojourn.engine.server.body.strict import UnsupportedField, parse
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.prompts import ModelLimits, PromptEncoder, list_prompts
from sojourn.engine.server.openai.protocol import CompletionRequest, GenerationRequest
from sojourn.engine.server.submission import sampling_params
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer
from tests.engine.server_process import post
from tests.further import further

# Not those below /debug: a burst waits for steps, which an idle server has none of. See test_debug.py.
PATHS = {path.removeprefix("POST "): body for path, body in BODIES.items() if "/debug/" not in path}
JSON_TYPE = {"content-type": "application/json"}
NEEDED = {
    "/v1/completions": {"model": '"tiny-model"', "prompt": '"x"', "max_tokens": "2"},
    "/v1/chat/completions": {
        "model": '"tiny-model"', "messages": '[{"role": "user", "content": "x"}]', "max_tokens": "2",
    },
    "/v1/responses": {"model": '"tiny-model"', "input": '"x"', "max_output_tokens": "2"},
    "/v1/messages": {
        "model": '"tiny-model"', "messages": '[{"role": "user", "content": "x"}]', "max_tokens": "2",
    },
    "/v1/messages/count_tokens": {"model": '"tiny-model"', "messages": '[{"role": "user", "content": "x"}]'},
    "/v1/moderations": {"input": '"x"'},
    "/tokenize": {"prompt": '"x"'},
    "/detokenize": {"tokens": "[5]"},
    "/v1/load_lora_adapter": {"lora_name": '"a"', "lora_path": '"b"'}, "/v1/unload_lora_adapter": {"lora_name": '"a"'},
}  # fmt: skip
NEEDED |= {path: NEEDED[path.removesuffix("/render")] for path in PATHS if path.endswith("/render")}
# JSON as it stands in a body: what json.dumps writes, and what only a hostile hand writes.
FRAGMENTS = [
    "-1", "0", "1", "2", "-0.0", "0.5", "-1e308", "1e-320", "1e999", "NaN", "-Infinity", str(2**31), str(2**31 - 1),
    str(-(2**31) - 1), str(2**63), str(2**63 - 1), str(-(2**63)), str(2**64), "9" * 4000, "true", "false", "null",
    '""', '"x"', '"-1"', '"NaN"', r'"\ud800"', r'"a\u0000b"', json.dumps("é🙂" * 300), json.dumps("\\" * 2000 + '"'),
    "[]", "[[]]", "[null]", "[-1]", "[0, 1]", "[1.5]", f"[{2**63}]", '["x"]', '[""]', '[["x"], [1]]', r'["\udfff"]',
    "{}", '{"x": 1}', '{"5": 1}', '{"-5": 1}', '{"5": 1e999}', '{"٥": 1}', '{"a": 1, "a": 2}', '{"": {"": {}}}',
    "[" * 60 + "]" * 60, "[" * 2000 + "]" * 2000, '{"a":' * 500 + "1" + "}" * 500, "[1, ", "undefined", "",
    '[{"role": "user", "content": null}]', '[{"role": "user", "content": [{"type": "image_url"}]}]', '{"type": "x"}',
    '[{"role": "\\u0000", "content": ""}]', '[{"type": "function", "function": {"name": "x"}}]',
]  # fmt: skip
LARGE = [json.dumps("x" * 1_000_000), json.dumps(["stop"] * 20_000), json.dumps({str(i): 1 for i in range(20_000)}),
         json.dumps("(" * 1_000_000), json.dumps([[7]] * 20_000)]  # fmt: skip


def fields(path: str) -> list[str]:
    return sorted({*PATHS[path].model_fields, *unsupported(path), "unheard_of"})


def unsupported(path: str) -> Mapping[str, UnsupportedField]:
    return PATHS[path].unsupported


def body_of(path: str, changed: dict[str, str]) -> bytes:
    members = NEEDED[path] | changed
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in members.items()) + "}").encode()


@pytest.fixture(scope="module")
def encoder():
    folder = model_folder("tiny-model")
    return PromptEncoder(Tokenizer(folder), ChatTemplate(folder))


def understand(path: str, content: bytes, encoder: PromptEncoder) -> None:
    """What the front does with a body before the core sees it."""
    body = parse(PATHS[path], content)
    if isinstance(body, CompletionRequest):
        limits = ModelLimits(512, "max_model_len is 512")
        prompts = list_prompts(body.prompt, limits)
        asyncio.run(encoder.encode(prompts, limits, add_special_tokens=True, param="prompt"))
    if isinstance(body, GenerationRequest):
        sampling_params(body, encoder.tokenizer, 0)


def own_fields(path: str) -> list[str]:
    """Those that no endpoint before has: the shared ones are checked once."""
    before = list(PATHS)[: list(PATHS).index(path)]
    known = {name: field for other in before for name, field in PATHS[other].model_fields.items()}
    new = [name for name, field in PATHS[path].model_fields.items() if repr(known.get(name)) != repr(field)]
    return [*new, *(unsupported(path) if path == "/v1/completions" else {}), "unheard_of"]


@pytest.mark.parametrize("values", [FRAGMENTS, *further(LARGE)], ids=["fragments", "large"])
@pytest.mark.parametrize("path", PATHS)
def test_every_field_takes_or_refuses_every_value_by_its_name(path, values, encoder):
    names = {*fields(path), *unsupported(path)}
    for field in own_fields(path):
        for value in values:
            try:
                understand(path, body_of(path, {field: value}), encoder)
            except ApiError as refused:
                assert refused.status == 400, (field, value[:80])
                # Not always by its own: `max_tokens` may be too little for another field, `n` too much for `best_of`.
                assert refused.param is None or refused.param.split(".")[0] in names
                assert len(refused.message) < 1000


def hostile_bodies(path: str):
    some = st.dictionaries(st.sampled_from(fields(path)), st.sampled_from(FRAGMENTS), max_size=4)
    return some.map(lambda changed: body_of(path, changed))


@pytest.mark.parametrize("path", PATHS)
def test_the_server_answers_or_refuses_and_lives_on(api_server, path):
    before = api_server.core_pid()
    with httpx.Client(base_url=api_server.url, headers=JSON_TYPE, timeout=30) as client:

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(hostile_bodies(path))
        def check(content: bytes) -> None:
            answer = client.post(path, content=content)
            assert answer.status_code in (200, 400, 404), (content, answer.text)
            if answer.status_code != 200:
                known = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
                assert set(answer.json()["error"]) == known

        check()
    assert api_server.core_pid() == before and post(api_server, max_tokens=1).status_code == 200


def test_large_values_are_refused_by_the_server(api_server):
    for field in ("prompt", "stop", "logit_bias", "bad_words", "user", "unheard_of", "metadata", "allowed_token_ids"):
        for value in LARGE:
            content = body_of("/v1/completions", {field: value})
            answer = httpx.post(f"{api_server.url}/v1/completions", content=content, headers=JSON_TYPE, timeout=30)
            assert answer.status_code == 400
    assert post(api_server, max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", [b"a\rb", b"a\tb", b"\xc3\xa9", b"a" * 129, b"", b"a b", b'"', b"../x", b"\x7f"])
def test_a_request_id_that_could_do_harm_is_replaced_or_refused(api_server, name):
    url = httpx.URL(api_server.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        lines = [b"GET /health HTTP/1.1", b"Host: localhost", b"Connection: close", b"x-request-id: " + name, b"", b""]
        connection.sendall(b"\r\n".join(lines))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    if b" 200 " in answer.splitlines()[0]:
        shown = re.search(rb"x-request-id: (.*)\r\n", answer)[1]
        assert re.fullmatch(rb"[0-9a-f]{32}", shown)
    else:
        assert answer.startswith(b"HTTP/1.1 400")
