"""The client of a moderation endpoint, against a scripted one."""

import asyncio
import json

import httpx
import pytest

from sojourn.engine.server.gateway.moderation.http_endpoint import HttpModerator
from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed, Verdict

GOOD = {
    "categories": {"hate": False, "violence": True, "new": False},
    "category_scores": {"hate": 0.6, "violence": 0.9},
}


class Endpoint:
    """Gives its answers one after the other, the last one for ever."""

    def __init__(self, *answers: httpx.Response | Exception | float):
        self.answers = list(answers)
        self.bodies: list[dict] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        return answer


def good(*results: dict) -> httpx.Response:
    return httpx.Response(200, json={"id": "x", "model": "m", "results": list(results or (GOOD,))})


def check(endpoint: Endpoint, text: str = "a text", **settings) -> Verdict:
    async def ask() -> Verdict:
        transport = httpx.MockTransport(endpoint)
        settings.setdefault("categories", ["hate", "violence", "other"])
        moderator = HttpModerator("service", "http://x/v1/moderations", transport=transport, **settings)
        try:
            return await moderator.check(text, "input")
        finally:
            await moderator.close()

    return asyncio.run(ask())


def test_categories_are_flagged_as_the_endpoint_says_or_by_their_threshold():
    assert check(Endpoint(good())).flagged == {"violence"}
    assert check(Endpoint(good()), thresholds={"hate": 0.6, "violence": 0.95}).flagged == {"hate"}
    assert check(Endpoint(good()), thresholds={"hate": 0.61}).flagged == {"violence"}


def test_categories_that_an_endpoint_invents_count_as_the_last_one():
    invented = {"categories": {"odd": True}, "category_scores": {"odd": 0.5}}
    verdict = check(Endpoint(good(invented)))
    assert (verdict.flagged, verdict.scores) == ({"other"}, {"other": 0.5})


def test_a_long_text_is_sent_in_parts_of_one_request():
    clean = {"categories": {"hate": False}, "category_scores": {"hate": 0.1}}
    endpoint = Endpoint(good(clean, clean, GOOD))
    assert check(endpoint, "x" * 250, max_part_characters=100, model="m").flagged == {"violence"}
    assert endpoint.bodies == [{"input": ["x" * 100, "x" * 100, "x" * 50], "model": "m"}]


@pytest.mark.parametrize("failure", [httpx.Response(503), httpx.Response(429), httpx.ConnectError("refused")])
def test_what_may_pass_is_tried_again(failure):
    endpoint = Endpoint(failure, good())
    assert check(endpoint, retries=1).flagged == {"violence"} and len(endpoint.bodies) == 2
    endpoint = Endpoint(failure)
    with pytest.raises(ModerationFailed):
        check(endpoint, retries=2)
    assert len(endpoint.bodies) == 3


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(401),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"results": []}),
        httpx.Response(200, json=[]),
        good({"categories": {}}),
        good({"categories": [], "category_scores": {"hate": "high"}}),
    ],
)
def test_what_stays_wrong_fails_at_once(answer):
    endpoint = Endpoint(answer)
    with pytest.raises(ModerationFailed, match="service"):
        check(endpoint, retries=5)
    assert len(endpoint.bodies) == 1


def test_a_check_has_one_bound_of_time_with_all_its_retries():
    with pytest.raises(ModerationFailed, match=r"in 0\.1 s"):
        check(Endpoint(5.0), timeout_seconds=0.1, retries=5)
