"""Prompts are as long as asked for when only the server can count their tokens; a server that cannot is refused."""

import json

import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.prompts.build import load_tokenizer
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.loadgen.target.server_tokenizer import ServerTokenizer
from tests.loadgen.scenarios import CHAT, scenario
from tests.loadgen.schedule.test_content import BLOCKS, MOONCAKE
from tests.loadgen.scripted_server import Script, ScriptedServer

TOKENIZER = load_tokenizer("tiny-model")
TARGET = {"tokenizer": "server"}


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def server() -> ScriptedServer:
    return ScriptedServer(Script(tokenize=tokens)).start()


def prompts(chosen, url: str) -> tuple[list[int], list[str]]:
    """(wanted lengths, texts)"""
    schedule = build_schedule(chosen, 1, "x")
    wire = build_wire_requests(chosen, 1, schedule, parse_base_url(url), "m")
    return [request.prompt_tokens for request in schedule], [
        json.loads(request.split(b"\r\n\r\n", 1)[1])["prompt"] for request in wire.values()
    ]


def test_server_counts_as_its_tokenizer_does_and_is_asked_once(server):
    asked = ServerTokenizer(parse_base_url(server.url), "m")
    for text in ("a prompt", "a prompt", "Grüße \n"):
        assert asked.encode(text, add_special_tokens=False).ids == tokens(text)
    asked.close()


def test_prose_is_as_long_as_asked_for_within_a_word(server):
    sizes = {"distribution": "uniform", "min_tokens": 10, "max_tokens": 900}
    shared = {"shared_prefix_tokens": 8}
    chosen = scenario({"process": "at_once", "count": 12}, [CHAT | shared | {"prompt_tokens": sizes}], target=TARGET)
    wanted, sent = prompts(chosen, server.url)
    off = [abs(len(tokens(text)) - size) for text, size in zip(sent, wanted, strict=True)]
    assert max(off) <= 6 and sum(off) / len(off) <= 2  # a server does not tell where a word could be cut


def test_blocks_are_exact(server):
    wanted, sent = prompts(scenario(MOONCAKE | {"count": 5}, [BLOCKS], target=TARGET), server.url)
    assert [len(tokens(text)) for text in sent] == wanted
    assert {tuple(tokens(text)[:16]) for text in sent} == {tuple(tokens(sent[0])[:16])}


@pytest.mark.server
def test_server_that_does_not_tokenize_is_refused_with_the_way_out():
    chosen, silent = scenario(target=TARGET), ScriptedServer().start()
    with pytest.raises(ScenarioError, match=r"/tokenize tells no tokens \(HTTP 404: .*name a tokenizer\.json instead"):
        prompts(chosen, silent.url)
    with pytest.raises(ScenarioError, match="tells no tokens"):
        prompts(chosen, "http://127.0.0.1:1")
