"""Prompts and keys of clients stand in nothing that the server shows, logs or records."""

from bench.torture.secrets import PROMPT, found_in, maltreat, pages, records
from metrics.run.directory import RunDirectory
from tests.engine.server_process import post, wait_for


def test_no_prompt_and_no_key_stays_anywhere(api_server):
    folder = api_server.log.parent / "run"
    known = len(RunDirectory(folder).arrow("requests"))
    assert maltreat(api_server.url) > 10
    assert PROMPT in post(api_server, prompt=PROMPT, max_tokens=1, echo=True).text  # so it would be found
    wait_for(lambda: len(RunDirectory(folder).arrow("requests")) >= known + 5)  # of those that the core got
    shown = pages(api_server.url) | records(folder) | {"log": api_server.log.read_text()}
    assert len(shown) > 10 and not {name for name, text in shown.items() if found_in(text)}
