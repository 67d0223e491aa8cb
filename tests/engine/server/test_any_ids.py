"""A model that writes bytes at random: every call is answered, and its text is that of its ids."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.engine.server_process import serving
from tests.engine.token.text.kinds import byte_fallback_model

pytestmark = pytest.mark.server

PROMPTS = ["a", "a\n", "the a", [1], [1, 3 + 0xE6], [1, 3 + 0xE6, 3 + 0x97], [1, 259, 3 + 0x0A]]
STOPS = ["\ufffd\ufffd\ufffd", "\n"]


def complete(url, seed):
    """One of the ways to ask, and what came."""
    streams = seed % 3 == 0
    body = {
        "model": "bytes", "prompt": PROMPTS[seed % len(PROMPTS)], "seed": seed, "temperature": 1.5,
        "max_tokens": 5 + seed % 40, "ignore_eos": True, "return_token_ids": True, "stream": streams, "n": 1 + seed % 2,
        "logprobs": 1 if seed % 5 else None, "stop": STOPS if seed % 7 == 0 else [],
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not streams:
        return body, answer.json()["choices"]
    lines = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]", answer.text
    whole = [{"text": "", "token_ids": [], "offsets": []} for _ in range(body["n"])]
    for piece in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        own = whole[piece["index"]]
        own["text"] += piece["text"]
        own["token_ids"] += piece["token_ids"] or []
        own["offsets"] += (piece["logprobs"] or {}).get("text_offset", [])
        own |= {key: piece[key] for key in ("finish_reason", "prompt_token_ids") if key in piece}
    for own in whole:
        own["logprobs"] = {"text_offset": own["offsets"]} if body["logprobs"] else None
    return body, whole


def check(folder, number):
    tokenizer = byte_fallback_model(folder)
    with serving(folder, str(folder), "--load-format", "dummy", "--served-model-name", "bytes") as server:
        server.wait_ready()
        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(lambda seed: complete(server.url, seed), range(number)))
        echoed = {"model": "bytes", "prompt": "a日b", "echo": True, "logprobs": 0, "max_tokens": 2, "ignore_eos": True}
        echoed = httpx.post(f"{server.url}/v1/completions", json=echoed).json()["choices"][0]
    assert echoed["text"].startswith("a日b") and echoed["logprobs"]["text_offset"][:7] == [0, 0, 1, 1, 1, 2, 3]
    for body, choices in done:
        for choice in choices:
            prompt, ids = choices[0]["prompt_token_ids"], choice["token_ids"]
            whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
            if choice["finish_reason"] == "length":
                assert choice["text"] == whole and len(ids) == body["max_tokens"]
                assert not any(stop in whole for stop in body["stop"])
            else:
                stop = min(whole.find(stop) for stop in body["stop"] if stop in whole)
                assert choice["text"] == whole[:stop]
            if choice["logprobs"] is not None:
                offsets = choice["logprobs"]["text_offset"]
                assert len(offsets) == len(ids) and offsets == sorted(offsets) and offsets[0] == 0
                assert offsets[-1] <= len(whole)


def test_calls_of_random_bytes_end_well(tmp_path):
    check(tmp_path, 24)


@pytest.mark.slow
def test_200_calls_of_random_bytes_end_well(tmp_path):
    check(tmp_path, 200)
