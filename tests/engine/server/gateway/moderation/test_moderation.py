"""Moderation in the server: what is refused costs nothing, and what is blocked reaches no client."""

import asyncio
import json
import re
import time

import httpx
import openai
import pytest

from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed, Verdict
from sojourn.metrics.ledger import Account
from tests.engine.server.scripted_core import MODEL, serving
from tests.engine.server.test_endpoint import Ends, closed, only

FILE = """
default: standard
checks:
  slurs: {kind: words, category: hate, words: [zorro, bad word]}
  numbers: {kind: regex, category: pii, patterns: [{pattern: '\\d{3}-\\d{4}', max_characters: 8}]}
profiles:
  standard:
    message: this is not for this server
    input: [{check: slurs}, {check: numbers, action: flag}]
    output: [{check: slurs}, {check: numbers, action: redact, replacement: '#'}]
  users:
    roles: [user, tool]
    input: [{check: slurs}]
"""
TEXT = "The function returns zorro and more of it."
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "moderation.yaml"
    path.write_text(FILE)
    return path


def run(check, file, **settings) -> Ends:
    ends = Ends()

    async def with_server() -> None:
        async with serving(moderation=file, **settings) as (app, core, client):
            app.state.front.on_end.append(ends)
            await check(app.state.front, core, client)
            assert not app.state.front._open
            await app.state.front.moderation.close()

    asyncio.run(with_server())
    return ends


def writes(front, core, text: str) -> int:
    """Lets the core write a text; its number of tokens."""
    core.output_ids = front.first.tokenizer.encode(text, add_special_tokens=False)
    return len(core.output_ids)


def events(answer: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


BLOCKED = {
    "text": ("/v1/completions", {"prompt": "say Z\u200bORRO"}),
    "list": ("/v1/completions", {"prompt": ["fine", "a bad\n word"]}),
    "system": ("/v1/chat/completions", {"messages": [{"role": "system", "content": "zorro"},
                                                     {"role": "user", "content": "x"}]}),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "zor"},
                                                                                 {"type": "text", "text": "ro"}]}]}),
    "call": ("/v1/chat/completions", {"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": "zorro"}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "fine"}]}),
    "result": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"},
                                                     {"role": "assistant", "content": "y"},
                                                     {"role": "tool", "tool_call_id": "a", "content": "zorro"}]}),
    "responses": ("/v1/responses", {"input": "zorro"}),
    "message": ("/v1/messages", {"messages": [{"role": "user", "content": "zorro"}], "max_tokens": 4}),
    "instructions": ("/v1/responses", {"input": "x", "instructions": "zorro"}),
}  # fmt: skip


def test_a_blocked_input_is_refused_before_the_core_hears_of_it(file):
    async def check(front, core, client) -> None:
        ids = front.first.tokenizer.encode("say zorro", add_special_tokens=False)
        sent = BLOCKED | {"ids": ("/v1/completions", {"prompt": ids})}
        for name, (path, body) in sent.items():
            answer = await client.post(path, headers={"x-request-id": name}, json={"model": MODEL} | body)
            error = answer.json()["error"]
            assert answer.status_code == 400, (name, answer.text)
            assert error["message"] == "this is not for this server (hate)"
            if path == "/v1/messages":
                continue  # Anthropic's errors have neither a code nor a field
            assert error["code"] == "content_filter"
            assert error["param"] == {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
        assert not core.submitted
        page = (await client.get("/metrics")).text
        labels = '{[^}]*kind="input",category="hate",action="block"}'
        assert re.search(f"moderation_flagged_total{labels} {len(sent)}", page)
        assert re.search(f'finished_total{{[^}}]*outcome="content_filter"}} {len(sent)}', page)

    ends = run(check, file)
    for name in [*BLOCKED, "ids"]:
        status, code, record = only(ends, name)
        assert (status, code, record.finish_reason) == (400, "content_filter", "content_filter")
        assert record.prompt_tokens and not record.computed_tokens and not record.output_tokens and closed(record)
        assert record.ledger[Account.REQUEST_MODERATION] > 0 and record.ledger[Account.TOKEN_ENCODE] > 0


def test_roles_limit_whose_messages_are_checked(file):
    file.write_text(FILE.replace("default: standard", "default: users"))

    async def check(front, core, client) -> None:
        for role, status in (("system", 200), ("user", 400)):
            messages = [{"role": role, "content": "zorro"}, {"role": "user", "content": "x"}]
            answer = await client.post("/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 2})
            assert answer.status_code == status, answer.text

    run(check, file)


def test_a_flagged_input_goes_on_and_is_counted(file):
    async def check(front, core, client) -> None:
        body = {"model": MODEL, "prompt": "call 555-1234", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert front.moderation.events.flagged == {("input", "pii", "flag"): 1}

    run(check, file)


def ended_with(path: str, answer: dict) -> tuple[str, str]:
    if path == "/v1/messages":
        return answer["content"][0]["text"], answer["stop_reason"]
    if path == "/v1/responses":
        assert answer["status"] == "incomplete"
        return answer["output"][0]["content"][0]["text"], answer["incomplete_details"]["reason"]
    (choice,) = answer["choices"]
    return choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 40}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 40}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 40}),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 40}),
    ],
)
def test_a_blocked_word_ends_an_answer_before_it(file, path, body):
    async def check(front, core, client) -> None:
        writes(front, core, TEXT)
        asked = {"model": MODEL} | body
        whole = await client.post(path, headers={"x-request-id": "whole"}, json=asked)
        reason = "refusal" if path == "/v1/messages" else "content_filter"
        assert ended_with(path, whole.json()) == ("The function returns ", reason)
        assert "zorr" not in whole.text
        streamed = await client.post(path, headers={"x-request-id": "streamed"}, json=asked | {"stream": True})
        assert "zo" not in streamed.text
        if path == "/v1/messages":
            assert events(streamed)[-2]["delta"]["stop_reason"] == "refusal"
        elif path == "/v1/responses":
            assert ended_with(path, events(streamed)[-1]["response"])[1] == "content_filter"
        else:
            assert events(streamed)[-1]["choices"][0]["finish_reason"] == "content_filter"
        assert core.aborted == ["whole", "streamed"]

    ends = run(check, file)
    for name in ("whole", "streamed"):
        status, code, record = only(ends, name)
        assert (status, code, record.finish_reason, record.error) == (200, None, "content_filter", None)
        assert closed(record) and record.ledger[Account.REQUEST_MODERATION] > 0 and 0 < record.output_tokens < 40


def test_choices_are_moderated_apart_and_logprobs_wait_with_their_text(file):
    async def check(front, core, client) -> None:
        num_tokens = writes(front, core, "Call 555-1234 or not. ")
        body = {"model": MODEL, "prompt": "x", "max_tokens": num_tokens, "n": 2, "return_token_ids": True}
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == ["Call # or not. "] * 2
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
        texts, ids = ["", ""], [[], []]
        for choice in (event["choices"][0] for event in events(streamed)):
            texts[choice["index"]] += choice["text"]
            ids[choice["index"]] += choice["token_ids"] or []
        assert texts == ["Call # or not. "] * 2
        for shown in (*ids, *(choice["token_ids"] for choice in answer["choices"])):
            assert "555" not in front.first.tokenizer.decode(shown) and "1234" not in front.first.tokenizer.decode(
                shown
            )

    run(check, file)


def test_without_a_match_an_answer_is_what_it_is_without_moderation(file):
    async def check(front, core, client) -> None:
        body = CHAT | {"max_tokens": 30, "stream": True, "n": 2}
        checked = await client.post("/v1/chat/completions", json=body)
        front.moderation.profiles.clear()
        free = await client.post("/v1/chat/completions", json=body)

        def texts(answer: httpx.Response) -> list[str]:
            found = ["", ""]
            for event in events(answer):
                choice = event["choices"][0]
                found[choice["index"]] += choice["delta"].get("content") or ""
            return found

        assert texts(checked) == texts(free) and texts(free)[0]

    run(check, file)


class SlowJudge:
    """Flags a text that has the word; the verdict takes its time, or fails."""

    name, categories, allows_on_failure = "slow", ("violence",), False

    def __init__(self, seconds: float, word: str = "zorro", fails: bool = False):
        self.seconds, self.word, self.fails, self.texts = seconds, word, fails, []

    async def check(self, text: str, kind: str) -> Verdict:
        self.texts.append(text)
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise ModerationFailed("it is down")
        return Verdict(frozenset({"violence"}) if self.word in text else frozenset())

    async def close(self) -> None:
        """Nothing is open."""


def judged_by(front, judge: SlowJudge, *, holds: bool = True) -> None:
    from dataclasses import replace

    from sojourn.engine.server.gateway.moderation.profile import Rule

    standard = front.moderation.profiles["standard"]
    changed = replace(
        standard, input_rules=(), output_rules=(Rule(judge, "block"),), holds=holds, window_characters=40
    )  # fmt: skip
    front.moderation.profiles["standard"] = changed


SENTENCES = "One sentence here is fine. Another one is fine, too. Here comes zorro in it. And so on it goes. "


@pytest.mark.parametrize("stream", [False, True])
def test_windows_are_shown_after_their_verdict_and_their_time_is_moderation(file, stream):
    async def check(front, core, client) -> None:
        writes(front, core, SENTENCES)
        judged_by(front, SlowJudge(0.05))
        body = {"model": MODEL, "prompt": "x", "max_tokens": 100, "stream": stream}
        answer = await client.post("/v1/completions", headers={"x-request-id": "held"}, json=body)
        shown = events(answer) if stream else [answer.json()]
        texts = [choice["text"] for event in shown for choice in event["choices"]]
        assert "".join(texts) == SENTENCES[: SENTENCES.index(" Here comes")] + " "
        assert core.aborted == ["held"]

    _, _, record = only(run(check, file), "held")
    assert record.finish_reason == "content_filter" and closed(record)
    assert record.ledger[Account.REQUEST_MODERATION] > 40e6
    assert not stream or (record.ttft[Account.REQUEST_MODERATION] > 40e6)
    if stream:
        ttft_ns = record.first_written_ns - record.arrived_ns
        assert abs(sum(record.ttft) - ttft_ns) < 1e5


def test_released_text_is_cut_when_a_verdict_flags_it(file):
    async def check(front, core, client) -> None:
        writes(front, core, SENTENCES)
        judged_by(front, SlowJudge(0.02), holds=False)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "stream": True}
        answer = await client.post("/v1/completions", headers={"x-request-id": "cut"}, json=body)
        text = "".join(event["choices"][0]["text"] for event in events(answer))
        assert len(SENTENCES) / 2 < len(text) < 10 * len(SENTENCES)
        assert events(answer)[-1]["choices"][0]["finish_reason"] == "content_filter" and core.aborted == ["cut"]

    assert closed(only(run(check, file), "cut")[2])


@pytest.mark.parametrize("allows", [False, True])
def test_a_check_without_a_verdict_refuses_or_allows_as_it_says(file, allows):
    async def check(front, core, client) -> None:
        num_tokens = writes(front, core, SENTENCES)
        judge = SlowJudge(0.0, fails=True)
        judge.allows_on_failure = allows
        judged_by(front, judge)
        body = {"model": MODEL, "prompt": "x", "max_tokens": num_tokens}
        answer = await client.post("/v1/completions", headers={"x-request-id": "failed"}, json=body)
        if allows:
            assert answer.json()["choices"][0]["text"] == SENTENCES
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "moderation_unavailable")
        assert front.moderation.events.failed["slow"] >= 1
        page = (await client.get("/metrics")).text
        assert re.search('moderation_failed_total{[^}]*check="slow"} [1-9]', page)

    status, _, record = only(run(check, file), "failed")
    assert closed(record) and status == (200 if allows else 503)


def test_a_client_that_leaves_ends_the_checks_under_way(file):
    async def check(front, core, client) -> None:
        writes(front, core, SENTENCES)
        judge = SlowJudge(30)
        judged_by(front, judge)
        body = {"model": MODEL, "prompt": "x", "max_tokens": 200, "stream": True}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        while not judge.texts:
            await asyncio.sleep(0.001)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        begin = time.monotonic()
        while front._open and time.monotonic() < begin + 5:
            await asyncio.sleep(0.001)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "moderation of a window"]

    run(check, file)


def test_the_moderations_endpoint_speaks_for_the_input_checks(file):
    async def check(front, core, client) -> None:
        asked = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=client, max_retries=0)
        one = await asked.moderations.create(input="a bad word")
        assert one.model == "standard" and one.results[0].flagged and one.results[0].categories.hate
        assert one.results[0].category_scores.hate == 1.0 and not one.results[0].categories.violence
        several = await asked.moderations.create(input=["fine", "zorro", "555-1234"], model="standard")
        assert [result.flagged for result in several.results] == [False, True, True]
        assert several.results[2].categories.model_extra["pii"] is True
        parts = await asked.moderations.create(input=[{"type": "text", "text": "fine"}], model="users")
        assert [result.flagged for result in parts.results] == [False]
        for body, status, says in (
            ({"input": [{"type": "image_url", "image_url": {"url": "x"}}]}, 400, "checks texts only"),
            ({"input": 5}, 400, "not a text"),
            ({"input": []}, 400, "not a text"),
            ({"input": ["x"] * 129}, 400, "may have 128"),
            ({"input": ["x" * 500_000, "y" * 500_001]}, 400, "may have 1,000,000"),
            ({"input": "x", "model": "omni"}, 404, "may be standard, users"),
        ):
            answer = await client.post("/v1/moderations", json=body)
            assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text
        for largest in (["x"] * 128, "x" * 1_000_000):
            assert (await client.post("/v1/moderations", json={"input": largest})).status_code == 200

    run(check, file)


def test_without_a_moderation_file_nothing_is_checked():
    async def check() -> None:
        async with serving() as (_, _, client):
            answer = await client.post("/v1/moderations", json={"input": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "moderation_off")

    asyncio.run(check())


def test_a_file_is_reloaded_as_a_whole_or_not_at_all(file):
    async def check(front, core, client) -> None:
        moderation, before = front.moderation, front.moderation.profiles
        file.write_text(FILE.replace("zorro", "fine"))
        await moderation.reload()
        assert moderation.profiles is not before
        answer = await client.post("/v1/moderations", json={"input": "zorro"})
        assert not answer.json()["results"][0]["flagged"]
        reloaded = moderation.profiles
        file.write_text(FILE.replace("check: numbers", "check: letters"))
        with pytest.raises(Exception, match="letters"):
            await moderation.reload()
        assert moderation.profiles is reloaded

    run(check, file)


def test_a_changed_file_is_noticed_and_a_broken_one_changes_nothing(file, monkeypatch):
    monkeypatch.setattr("sojourn.engine.server.gateway.moderation.moderation.WATCH_SECONDS", 0.01)

    async def check(front, core, client) -> None:
        watching, seen = asyncio.create_task(front.moderation.watch()), front.moderation.profiles
        for content, changes in ((FILE.replace("zorro", "fine"), True), ("checks: {", False), (FILE, True)):
            file.write_text(content)
            for _ in range(200 if changes else 10):
                await asyncio.sleep(0.01)
                if front.moderation.profiles is not seen:
                    break
            assert (front.moderation.profiles is not seen) == changes
            seen = front.moderation.profiles
        watching.cancel()

    run(check, file)
