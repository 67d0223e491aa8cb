"""The official Python clients before a server with keys and limits: each error is of the class that they know."""

import asyncio

import anthropic
import httpx2
import openai
import pytest
import yaml

from tests.engine.server.gateway.access.test_keys import write_keys
from tests.engine.server.scripted_core import MODEL, serving

MESSAGES = [{"role": "user", "content": "Return a list"}]


def clients(app, key: str) -> dict:
    """API → a call of its official client, whose error has the official shape or would not be read."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    own = {"http_client": httpx2.AsyncClient(transport=transport), "api_key": key, "max_retries": 0}
    chat = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", **own)
    messages = anthropic.AsyncAnthropic(base_url="http://127.0.0.1", **own)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
    return {
        "openai": lambda: chat.chat.completions.create(**asked),
        "anthropic": lambda: messages.messages.create(**asked),
        "openai models": lambda: chat.models.list(),
    }


def run(check, **settings) -> None:
    async def with_server() -> None:
        async with serving(**settings) as (app, _, _):
            await check(app)

    asyncio.run(with_server())


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_key_opens_and_none_or_a_wrong_one_is_an_authentication_error(tmp_path, api):
    keys = write_keys(tmp_path / "keys.yaml", acme="api", scraper="metrics")
    module = {"openai": openai, "anthropic": anthropic}[api]

    async def check(app) -> None:
        assert (await clients(app, keys["acme"])[api]()).model == MODEL
        for key in ("unused", "sk-wrong"):
            with pytest.raises(module.AuthenticationError) as refused:
                await clients(app, key)[api]()
            assert refused.value.status_code == 401
        with pytest.raises(module.PermissionDeniedError) as refused:
            await clients(app, keys["scraper"])[api]()
        assert refused.value.status_code == 403
        if api == "openai":
            assert refused.value.code == "insufficient_scope" and refused.value.type
            with pytest.raises(openai.AuthenticationError):
                await clients(app, "sk-wrong")["openai models"]()
        else:
            assert refused.value.type == "permission_error"

    run(check, api_keys=tmp_path / "keys.yaml")


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_tenants_limit_is_a_rate_limit_error(tmp_path, api):
    rules = {"default_tier": "small", "tiers": {"small": {"requests_per_minute": 1}}}
    (tmp_path / "access.yaml").write_text(yaml.safe_dump(rules))
    module = {"openai": openai, "anthropic": anthropic}[api]

    async def check(app) -> None:
        ask = clients(app, "unused")[api]
        await ask()
        with pytest.raises(module.RateLimitError) as refused:
            await ask()
        assert int(refused.value.response.headers["retry-after"]) >= 1
        kind = refused.value.type
        assert kind == "rate_limit_error"

    run(check, access=tmp_path / "access.yaml")
