"""A web page that a developer has open cannot use, or read, the server on the developer's machine."""

import asyncio
from collections.abc import Callable

import httpx
import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.http.listener import exposure
from sojourn.engine.server.http.web_pages import allowed_hosts, is_loopback
from tests.engine.server.scripted_core import MODEL, serving

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "The function", "max_tokens": 2}
PAGE = "http://evil.example"


def run(check: Callable, **settings) -> None:
    async def with_server() -> None:
        async with serving(**settings) as (app, core, client):
            await check(app, core, client)

    asyncio.run(with_server())


async def refused(client: httpx.AsyncClient, status: int, code: str, path: str = COMPLETIONS, **request) -> str:
    answer = await client.post(path, **{"json": BODY} | request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert not {"access-control-allow-origin", "access-control-allow-methods"} & set(answer.headers)
    return answer.json()["error"]["message"]


# What a page may send anywhere without a preflight question: the types of a form, and none at all (a Blob).
FORM_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize", "/debug/profile"])
def test_a_page_cannot_send_a_simple_request(path):
    async def check(app, core, client) -> None:
        del client.headers["content-type"]
        for sent_type in FORM_TYPES:
            headers = {} if sent_type is None else {"content-type": sent_type}
            for origin in ({}, {"origin": "http://127.0.0.1"}):  # a form in an old browser; the guard of types alone
                request = {"json": None, "content": b"{}", "headers": headers | origin}
                message = await refused(client, 415, "unsupported_content_type", path, **request)
                assert "application/json" in message
        for origin in (PAGE, "null", "http://localhost:3000", "http://127.0.0.1:81", "http://[::"):
            await refused(client, 403, "foreign_origin", path, headers={"origin": origin})
        assert not core.submitted

    run(check)


def test_a_page_whose_name_leads_to_this_machine_is_another_host():
    async def check(app, core, client) -> None:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0",
                     "192.168.0.7", "[::2]:8000", "[::ffff:7f00:1].evil"):  # fmt: skip
            for method, path in (("POST", COMPLETIONS), ("GET", "/debug/requests"), ("GET", "/metrics")):
                answer = await client.request(method, path, headers={"host": host, "origin": f"http://{host}"})
                assert answer.status_code == 400, host
                assert answer.json()["error"]["code"] in ("foreign_host", "invalid_host")
        for host in ("", "a b", "127.0.0.1/x", "user@127.0.0.1", "127.0.0.1:8000:1", "a\tb", "[::1", "\xe9", "x" * 300):
            message = await refused(client, 400, "invalid_host", headers={"host": host.encode("latin-1")})
            assert len(message) < 300
        twice = [("host", "127.0.0.1"), ("host", "evil.example")]
        await refused(client, 400, "invalid_host", headers=twice)
        assert not core.submitted

    run(check)


def test_clients_on_this_machine_are_served():
    async def check(app, core, client) -> None:
        for headers in (
            {"host": "localhost:8000"}, {"host": "LOCALHOST."}, {"host": "llm.localhost"}, {"host": "127.0.0.1:8000"},
            {"host": "127.1.2.3"}, {"host": "[::1]:8000"}, {"origin": "http://127.0.0.1"},
            {"host": "localhost:80", "origin": "http://localhost:80"},  # a page of this server, such as /docs
            {"content-type": "Application/JSON ; charset=UTF-8"}, {"content-type": "application/vnd.x+json"},
        ):  # fmt: skip
            answer = await client.post(COMPLETIONS, json=BODY, headers=headers)
            assert answer.status_code == 200, (headers, answer.text)
        for headers, code in (
            ({"content-type": "application/jsonx"}, "unsupported_content_type"),
            ({"content-type": "application/json; charset=utf-16"}, "unsupported_content_type"),
            ({"content-encoding": "gzip"}, "unsupported_content_encoding"),
        ):
            await refused(client, 415, code, headers=headers)
        page = app.state.front.first.telemetry.scrape().decode()
        assert 'sojourn_request_rejected_total{model_name="tiny-model",reason="unsupported_content_encoding"} 1' in page

    run(check)


def test_pages_of_allowed_origins_are_asked_and_answered():
    ours = "http://localhost:3000"

    async def check(app, core, client) -> None:
        question = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        answer = await client.options(COMPLETIONS, headers=question | {"origin": ours})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ours
        assert "content-type" in answer.headers["access-control-allow-headers"].lower()
        answer = await client.post(COMPLETIONS, json=BODY, headers={"origin": ours})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ours
        # The page can read why it was refused.
        answer = await client.post(COMPLETIONS, headers={"origin": ours, "content-type": "text/plain"})
        assert answer.status_code == 415 and answer.headers["access-control-allow-origin"] == ours
        answer = await client.options(COMPLETIONS, headers=question | {"origin": PAGE})
        assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
        await refused(client, 403, "foreign_origin", headers={"origin": PAGE})

    run(check, allowed_origins=f"{ours}, https://chat.example")


def test_without_allowed_origins_no_question_is_answered():
    async def check(app, core, client) -> None:
        question = {"access-control-request-method": "POST", "origin": PAGE}
        answer = await client.options(COMPLETIONS, headers=question)
        assert answer.status_code == 405 and not [name for name in answer.headers if name.startswith("access-control")]

    run(check)


def test_names_of_the_server_are_those_of_the_setting():
    def hosts(**settings) -> frozenset[str] | None:
        return allowed_hosts(EngineConfig(model=MODEL, **settings))

    assert hosts() == frozenset() and hosts(host="::1") == frozenset() and hosts(host="localhost") == frozenset()
    assert hosts(host="0.0.0.0") is None and hosts(allowed_hosts="*") is None
    assert hosts(host="0.0.0.0", allowed_hosts="LLM.example, gpu-1") == {"llm.example", "gpu-1"}
    for setting in ({"allowed_hosts": "http://x"}, {"allowed_hosts": "x:80"}, {"allowed_origins": "localhost:3000"}):
        with pytest.raises(ValueError, match="give"):
            EngineConfig(model=MODEL, **setting)

    async def check(app, core, client) -> None:
        assert (await client.get("/health", headers={"host": "llm.example"})).status_code == 200
        assert (await client.get("/health", headers={"host": "localhost"})).status_code == 200
        assert (await client.get("/health", headers={"host": "evil.example"})).status_code == 400

    run(check, host="0.0.0.0", allowed_hosts="llm.example")
    assert not is_loopback("10.0.0.1") and not is_loopback("") and not is_loopback("::")


def test_debug_routes_can_be_switched_off():
    async def check(app, core, client) -> None:
        for path in ("/debug/steps", "/debug/requests", "/debug/requests/x"):
            assert (await client.get(path)).status_code == 404
        assert (await client.post("/debug/profile", json={"steps": 1})).status_code == 404

    run(check, debug_routes="off")


def test_a_server_that_others_reach_without_a_key_says_so():
    def warning(**settings) -> str | None:
        return exposure(EngineConfig(model=MODEL, **settings))

    assert warning() is warning(host="::1") is warning(host="0.0.0.0", api_keys="keys.yaml") is None
    assert "every address" in warning(host="0.0.0.0") and "--api-keys" in warning(host="::")
    assert "10.0.0.7" in warning(host="10.0.0.7") and "--debug-routes" not in warning(host="x", debug_routes="off")
