"""`sojourn watch --once`: its exit codes, its document, and what it refuses."""

import json

from sojourn.scripting.documents import json_schema
from tests.commands.program import run_program
from tests.metrics.live_pages import serving, working


def test_once_prints_the_document_and_ends_with_its_code():
    with serving(working()) as url:
        done = run_program("watch", url, "--once", "--json", "--for", "2", "--slo", "ttft:500")
    found = json.loads(done.stdout)
    assert (done.returncode, found["schema"], found["state"]) == (0, "sojourn.watch/1", "healthy")
    assert set(found) == set(json_schema("watch")["$defs"]["Watch"]["properties"])


def test_without_a_server_the_code_is_cannot_tell():
    with serving(lambda _: (404, b"")) as url:
        done = run_program("watch", url, "--once", "--for", "5")
    assert done.returncode == 3 and "has no /metrics" in " ".join(done.stdout.split())


def test_wrong_use_is_told():
    for arguments, sentence in (
        (("watch",), "no server is named"),
        (("watch", "ftp://x", "--once"), "no http address"),
        (("watch", "http://127.0.0.1:9", "--json"), "--json takes --once"),
        (("watch", "http://127.0.0.1:9", "--once", "--slo", "fast"), "--slo"),
    ):
        done = run_program(*arguments)
        assert done.returncode == 2 and sentence in done.stderr
