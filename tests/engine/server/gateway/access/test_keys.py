"""Where keys are set nothing is reached without one: whatever the path, the method or the protocol."""

import asyncio
import base64
import gc
import logging
from pathlib import Path

import pytest

from sojourn.engine.server.gateway.access.keys import append_key, create_key, find_key
from sojourn.engine.server.gateway.access.rules import load_rules
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server.scripted_core import MODEL, serving

BODY = {"model": MODEL, "prompt": "The function", "max_tokens": 2}


def write_keys(path: Path, **scopes: str) -> dict[str, str]:
    """A file with one key for each tenant, and the keys by tenant."""
    keys = {}
    for tenant, scope in scopes.items():
        keys[tenant], entry = create_key(tenant, scope)
        append_key(path, entry)
    return keys


@pytest.fixture
def keys(tmp_path) -> dict[str, str]:
    return write_keys(tmp_path / "keys.yaml", acme="api", scraper="metrics", root="admin")


def run(check, folder: Path, **settings) -> None:
    async def with_server() -> None:
        async with serving(api_keys=folder / "keys.yaml", **settings) as (app, core, client):
            await check(app, core, client)

    asyncio.run(with_server())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def raw(app, path: str, method: str = "GET", headers: tuple = (), **more) -> int:
    """The status of a scope as no well-behaved client would send it."""
    written, sent = [], [{"type": "http.request", "body": b""}]

    async def receive() -> dict:
        if not sent:
            await asyncio.Event().wait()
        return sent.pop()

    async def send(message: dict) -> None:
        written.append(message)

    plain = ((b"host", b"127.0.0.1"), (b"content-type", b"application/json"))
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "http_version": "1.1", "headers": [*plain, *headers], "scheme": "http", "root_path": "",
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
    } | more  # fmt: skip
    await app(scope, receive, send)
    return written[0]["status"]


PATHS = (
    "/v1/models", "/v1/completions", "/metrics", "/docs", "/redoc", "/openapi.json", "/debug/steps", "/version", "/",
    "//v1/models", "/v1//models", "/v1/%6dodels", "/./v1/models", "/health/../v1/models", "/health/", "/health%2e",
    "/HEALTH", "/v1/models/../../health", "/nothing", "*", "", "/health;/v1/models", "/ready/x", "/metrics/",
)  # fmt: skip


def test_no_path_method_or_host_gets_past_the_door(tmp_path, keys):
    async def check(app, core, client) -> None:
        for path in PATHS:
            for method in ("GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "TRACE", "CONNECT", "X"):
                assert await raw(app, path, method) == 401, f"{method} {path}"
        for host in (b"127.0.0.1/health", b"localhost/health?", b"127.0.0.1"):
            assert await raw(app, "/v1/models", headers=((b"host", host),)) in (400, 401)
        for name in (b"x-original-url", b"x-rewrite-url", b"x-forwarded-prefix", b"x-forwarded-path"):
            assert await raw(app, "/v1/models", headers=((name, b"/health"),)) == 401
        # A router that strips a prefix must not find a closed route behind an open path, or the other way round.
        assert await raw(app, "/health/v1/models", root_path="/health") == 401
        assert await raw(app, "/health", root_path="/health") == 401
        assert await raw(app, "/v1/health", root_path="/v1") == 401
        assert await raw(app, "/x/debug/steps", root_path="/x", headers=_headers(keys["acme"])) == 403
        assert await raw(app, "/health") == 200 and await raw(app, "/ready") == 200

    run(check, tmp_path)


def _headers(key: str) -> tuple:
    return ((b"authorization", f"Bearer {key}".encode()),)


def test_a_websocket_is_refused_before_it_opens(tmp_path, keys):
    async def check(app, core, client) -> None:
        for extensions, first in (
            ({}, "websocket.close"),
            ({"websocket.http.response": {}}, "websocket.http.response.start"),
        ):
            written = []

            async def send(message: dict, written=written) -> None:
                written.append(message)

            scope = {"type": "websocket", "path": "/health", "headers": [], "extensions": extensions, "root_path": ""}
            scope |= {"query_string": b"", "subprotocols": [], "scheme": "ws", "server": ("x", 1), "client": ("x", 1)}
            await app(scope | {"path": "/v1/models"}, None, send)
            assert written[0]["type"] == first and written[0].get("status", 401) == 401

    run(check, tmp_path)


def test_health_needs_a_key_too_where_it_is_not_open(tmp_path, keys):
    async def check(app, core, client) -> None:
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 401
        assert (await client.get("/ready", headers=bearer(keys["acme"]))).status_code == 200

    run(check, tmp_path, open_health=False)


def test_a_wrong_key_is_401_in_the_shape_of_openai(tmp_path, keys):
    acme = keys["acme"]
    basic = base64.b64encode(f"user:{acme}".encode()).decode()
    wrong = (
        {}, bearer(""), bearer("unused"), bearer(acme[:-1]), bearer(acme + "x"), bearer(acme[:16] + "A" * 43),
        bearer("sk-000000000000-" + "A" * 43), {"Authorization": acme}, {"Authorization": f"Basic {basic}"},
        {"x-api-key": "nothing"}, {"x-api-key": keys["root"]} | bearer(acme), {"Cookie": f"api_key={acme}"},
    )  # fmt: skip

    async def check(app, core, client) -> None:
        for headers in wrong:
            answer = await client.post("/v1/completions", json=BODY, headers=headers)
            error = answer.json()["error"]
            assert answer.status_code == 401 and error["code"] == "invalid_api_key", headers
            assert set(error) == {"message", "type", "param", "code"} and acme not in answer.text
            assert answer.headers["www-authenticate"].startswith("Bearer") and answer.headers["x-request-id"]
        assert not core.submitted
        assert (await client.get(f"/v1/models?api_key={acme}")).status_code == 401
        for headers in (
            bearer(acme),
            {"x-api-key": acme},
            bearer(acme) | {"x-api-key": acme},
            {"authorization": f"bearer  {acme}"},
        ):
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        page = (await client.get("/metrics", headers=bearer(keys["scraper"]))).text
        assert 'sojourn_request_unauthorized_total{model_name="tiny-model",reason="missing"} 3.0' in page

    run(check, tmp_path)


def test_a_key_opens_the_routes_of_its_scope_alone(tmp_path, keys):
    rows = {
        "/v1/models": (200, 403, 200), "/metrics": (403, 200, 200), "/debug/requests": (403, 403, 200),
        "/docs": (200, 403, 200), "/nothing": (404, 403, 404), "/health": (200, 200, 200),
        "//debug/steps": (403, 403, 404),
        "/DEBUG/steps": (403, 403, 404),
    }  # fmt: skip

    async def check(app, core, client) -> None:
        for path, statuses in rows.items():
            for tenant, status in zip(("acme", "scraper", "root"), statuses, strict=True):
                assert await raw(app, path, headers=_headers(keys[tenant])) == status, f"{tenant} {path}"

    run(check, tmp_path)


def test_the_key_says_whose_call_it_is_and_only_an_admin_acts_for_others(tmp_path, keys):
    async def check(app, core, client) -> None:
        for tenant in ("acme", "root"):
            headers = bearer(keys[tenant]) | {"x-sojourn-tenant": "victim"}
            answer = await client.post("/v1/completions", json=BODY | {"user": "victim"}, headers=headers)
            assert answer.status_code == 200
        assert [request.tenant for request in core.submitted] == ["acme", "victim"]

    run(check, tmp_path)


def test_the_tenants_for_whom_an_admin_acts_leave_nothing_behind(tmp_path, keys):
    async def check(app, core, client) -> None:
        for number in range(5):
            headers = bearer(keys["root"]) | {"x-sojourn-tenant": f"user-{number}"}
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        gc.collect()
        assert len(app.state.front.access._gates) <= 1  # the last call may still be held

    run(check, tmp_path)


def test_a_key_stands_in_no_log_record_metric_or_file(tmp_path, keys, caplog):
    caplog.set_level(logging.DEBUG)

    async def check(app, core, client) -> None:
        for key in (*keys.values(), "sk-wrong-" + keys["acme"]):
            await client.post("/v1/completions", json=BODY, headers=bearer(key))
            await client.get("/debug/requests", headers=bearer(key))
        page = (await client.get("/metrics", headers=bearer(keys["root"]))).text
        card = (await client.get("/v1/models", headers=bearer(keys["acme"]))).text
        shown = (await client.get("/debug/requests", headers=bearer(keys["root"]))).text
        assert not any(_secret(key) in text for key in keys.values() for text in (page, card, shown))
        assert "keys.yaml" not in card

    run(check, tmp_path, run_dir=tmp_path / "run")
    assert len(RunDirectory(tmp_path / "run").table("requests")) == 2  # of the keys acme and root
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for key in keys.values():
        assert _secret(key) not in caplog.text and not any(_secret(key).encode() in content for content in files)


def _secret(key: str) -> str:
    return key.split("-", 2)[2]


def test_digests_are_compared_in_constant_time_also_for_an_unknown_id(keys, tmp_path, monkeypatch):
    import hmac

    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    for key in ("sk-000000000000-" + "A" * 43, "nonsense", "ü"):
        assert find_key(key, {}) is None
    assert len(compared) == 3 and all(len(a) == len(b) == 64 for a, b in compared)


def test_the_file_of_keys_is_private_and_only_grows(tmp_path):
    path = tmp_path / "keys.yaml"
    write_keys(path, a="api")
    before = path.read_text()
    write_keys(path, b="admin")
    assert path.read_text().startswith(before) and path.stat().st_mode & 0o777 == 0o600


def test_a_key_is_added_behind_a_last_line_without_its_end(tmp_path):
    path = tmp_path / "keys.yaml"
    write_keys(path, first="api")
    path.write_text(path.read_text().rstrip("\n"))
    write_keys(path, second="api", third="api")
    assert [entry.tenant for entry in load_rules(None, path).keys.values()] == ["first", "second", "third"]
