"""Prompts have the wanted length, differ from one another, and share exactly the prefix that they are told to share."""

import itertools
import json
from dataclasses import replace

import pytest

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.bodies import PromptWriter, build_wire_requests, http_bytes
from sojourn.loadgen.prompts.build import CORPUS, PromptSource, load_tokenizer
from sojourn.loadgen.prompts.conversation import Conversation
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.metrics.errors import InputError
from tests.loadgen.scenarios import CHAT, scenario

pytestmark = pytest.mark.skipif(not CORPUS.exists(), reason="the bundled model's prose is not there")
BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-model")


def tokens(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_prompt_has_the_wanted_number_of_tokens(tokenizer):
    source = PromptSource(1, tokenizer)
    wanted = [1, 2, 7, 16, 50, 333, 1000, 3500] * 5
    off = [abs(len(tokens(tokenizer, source.prompt(size).text)) - size) for size in wanted]
    assert sum(error == 0 for error in off) >= 0.85 * len(off)
    assert max(off) <= 6  # where no cut of the text has exactly the number


def test_same_seed_gives_the_same_prompts():
    first, second, other = (PromptSource(seed) for seed in (1, 1, 2))
    assert [first.prompt(20) for _ in range(5)] == [second.prompt(20) for _ in range(5)]
    assert PromptSource(1).prompt(20) != other.prompt(20)


def test_no_two_prompts_or_prefixes_share_a_first_block_within_or_across_seeds(tokenizer):
    """A server that runs on has the prompts of the run before; there are only 50,000 words to begin at."""
    seen, made = set(), 0
    for seed in (1, 2):
        source = PromptSource(seed)
        texts = [source.prompt(40).text for _ in range(2_000)]
        texts += [source.shared_prefix(f"chat {number}", 40) for number in range(500)]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            seen.add(tuple(encoding.ids[:BLOCK]))
        made += len(texts)
    assert len(seen) == made


def test_prompts_differ_even_when_the_prose_is_used_up(tmp_path):
    prose = tmp_path / "prose.txt"
    prose.write_text(" ".join(f"word{number}" for number in range(50)))
    source = PromptSource(1, corpus=prose)
    assert len({source.prompt(10).text for _ in range(500)}) == 500


def test_shared_prefix_is_shared_to_the_token(tokenizer):
    source = PromptSource(1, tokenizer)
    prefix = source.shared_prefix("assistant 0", 128)
    head = tokens(tokenizer, prefix)
    assert len(head) == 128
    for size in (140, 200, 700):
        prompt = source.prompt(size, prefix, 128)
        assert prompt.text.startswith(prefix + " ")
        assert tokens(tokenizer, prompt.text)[:128] == head
        assert abs(len(tokens(tokenizer, prompt.text)) - size) <= 3
    assert source.shared_prefix("assistant 1", 128) != prefix


def test_turns_of_a_conversation_name_their_session_and_no_other_request_does():
    talk = CHAT | {"klass": "talk", "session": {"turns": 3, "think_time_s": 1, "turn_tokens": 8}}
    chosen = scenario({"process": "at_once", "count": 4}, [talk])
    schedule = build_schedule(chosen, 0, "run")
    wire = build_wire_requests(chosen, 0, schedule, parse_base_url("http://host:81"), "m")
    heads = {request.index: sent_names(Conversation().next_wire(wire[request.index])) for request in schedule}
    assert {heads[request.index] for request in schedule} == {(request.session_id,) for request in schedule}
    odd = replace(schedule[0], session_id="a user\r\nx-evil: 1")
    sent = http_bytes(parse_base_url("http://host:81"), chosen.target, odd, b"")
    assert sent_names(sent) == ("a%20user%0D%0Ax-evil%3A%201",) and b"\nx-evil" not in sent
    alone = scenario({"process": "at_once", "count": 1}, [CHAT])
    wire = build_wire_requests(alone, 0, build_schedule(alone, 0, "run"), parse_base_url("http://host:81"), "m")
    assert sent_names(wire[0]) == ()


def sent_names(request: bytes) -> tuple[str, ...]:
    """The values of X-Session-ID."""
    lines = request.split(b"\r\n\r\n", 1)[0].decode().split("\r\n")
    return tuple(line.partition(": ")[2] for line in lines if line.lower().startswith("x-session-id:"))


def test_body_says_what_the_scenario_asks_for():
    asked = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "ignore_eos": True, "priority": -2}
    classes = [CHAT | asked | {"tenant": "acme", "prompt_tokens": 40, "shared_prefix_tokens": 16}]
    chosen = scenario(classes=classes, target={"api": "chat", "usage": "continuous"})
    schedule = build_schedule(chosen, 0, "run")
    wire = build_wire_requests(chosen, 0, schedule, parse_base_url("http://host:81/deep/v1/"), "some-model")
    head, content = wire[0].split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    body = json.loads(content)
    assert lines[0] == "POST /deep/v1/chat/completions HTTP/1.1"
    assert {"Host: host:81", "Connection: close", f"Content-Length: {len(content)}"} <= set(lines)
    assert {"x-request-id: run-000000", "x-sojourn-class: chat", "x-sojourn-tenant: acme"} <= set(lines)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert asked.items() <= body.items()
    assert (body["model"], body["max_tokens"], body["stream"]) == ("some-model", 5, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert len({wire_request.split(b"\r\n\r\n", 1)[1] for wire_request in wire.values()}) == len(wire)


def test_a_seed_is_sent_only_where_the_class_asks_for_it():
    """A seed takes a request out of a server's batched sampler, and one version of vLLM dies of it."""
    variants = {"variants": [{"temperature": 0.9}, {"temperature": 0.0}]}
    for asked, seeded in (({"temperature": 0.8}, set()), ({"temperature": 0.8, "send_seed": True}, {0.8}),
                          ({"send_seed": True}, set()), (variants, set()),
                          (variants | {"send_seed": True}, {0.9})):  # fmt: skip
        chosen = scenario({"process": "at_once", "count": 12}, [CHAT | asked])
        schedule = build_schedule(chosen, 0, "run")
        first, again = (build_wire_requests(chosen, 0, schedule, parse_base_url("http://host"), "m") for _ in range(2))
        sent = [json.loads(content.split(b"\r\n\r\n", 1)[1]) for content in first.values()]
        assert {body["temperature"] for body in sent if "seed" in body} == seeded
        seeds = [body["seed"] for body in sent if "seed" in body]
        assert first == again and len(set(seeds)) == len(seeds)


def common_beginning(texts: list[str]) -> str:
    return "".join(
        letters[0] for letters in itertools.takewhile(lambda all_: len(set(all_)) == 1, zip(*texts, strict=False))
    )


def test_a_shared_part_that_stands_last_follows_what_is_the_requests_own():
    texts = {}
    for part in ("first", "last"):
        own = CHAT | {"prompt_tokens": 60, "shared_prefix_tokens": 40, "shared_part": part}
        chosen = scenario(classes=[own])
        schedule = build_schedule(chosen, 1, "t")
        source = PromptWriter(chosen, PromptSource(1))
        texts[part] = [source.prompt(request).text for request in schedule]
    first, last = texts["first"], texts["last"]
    shared = common_beginning(first).rsplit(" ", 1)[0]
    assert len(shared) > 100 and all(text.endswith(shared) for text in last)
    assert len(common_beginning(last)) < 10
    with pytest.raises(ValueError, match="has shared_part last, which is for requests of one turn"):
        scenario(classes=[CHAT | {"shared_part": "last"}])


def test_a_class_names_the_model_of_its_requests_and_no_adapter_beside_it():
    chosen = scenario(classes=[CHAT | {"model": "b"}])
    assert chosen.workload.classes[0].model == "b"
    with pytest.raises(ValueError, match="has model and adapter, and a request names one of them"):
        scenario(classes=[CHAT | {"model": "b", "adapter": "c"}])


def test_what_is_no_tokenizer_and_no_address_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(ScenarioError, match="neither a file nor a folder"):
        load_tokenizer(str(tmp_path / "absent"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ScenarioError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path))
    for address in ("localhost:port", "ftp://host", "http://", "http://host:port", "http://me@host"):
        with pytest.raises(InputError, match=r"http://127\.0\.0\.1:8000|SOJOURN_API_KEY"):
            parse_base_url(address)
