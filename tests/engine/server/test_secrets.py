"""Prompts and keys of clients stand in nothing that the server shows, logs or records."""

import asyncio

from bench.torture.secrets import PROMPT, found_in, maltreat, pages, records
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server.scripted_core import serving
from tests.engine.server_process import post, wait_for


def test_no_prompt_and_no_key_stays_anywhere(api_server):
    folder = api_server.log.parent / "run"
    known = len(RunDirectory(folder).arrow("requests"))
    assert maltreat(api_server.url) > 10
    assert PROMPT in post(api_server, prompt=PROMPT, max_tokens=1, echo=True).text  # so it would be found
    wait_for(lambda: len(RunDirectory(folder).arrow("requests")) >= known + 5)  # of those that the core got
    shown = pages(api_server.url) | records(folder) | {"log": api_server.log.read_text()}
    assert len(shown) > 10 and not {name for name, text in shown.items() if found_in(text)}


def test_no_path_and_no_address_of_the_operator_is_shown_to_clients(tmp_path):
    (tmp_path / "access.yaml").write_text("default_tier: all\ntiers: {all: {}}\n")
    (tmp_path / "prices.yaml").write_text("currency: EUR\nmodels: {}\n")
    files = {"access": tmp_path / "access.yaml", "usage_prices": tmp_path / "prices.yaml"}
    folders = {"usage_dir": tmp_path / "usage", "run_dir": tmp_path / "run"}

    async def shown() -> str:
        async with serving(**files, **folders, otlp_endpoint="http://user:password@collector") as (_, _, client):
            return (await client.get("/v1/models")).text

    text = asyncio.run(shown())
    assert "max_body_bytes" in text, "the settings stand there"
    assert str(tmp_path) not in text and "password" not in text
