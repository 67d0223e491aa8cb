"""What the torture scripts judge by: verdicts, growth, the page that they write, and one client process."""

import asyncio
import threading

import pytest

from bench.torture.client import Call, Loop, call_all
from bench.torture.document import with_sections
from bench.torture.memory import growth_of_second_half
from bench.torture.promises import FAIL, MISSED, PASS, new_outcome
from bench.torture.secrets import KEY, PROMPT, found_in


def test_a_figure_passes_at_its_bound_and_is_missed_above_it_and_no_figure_is_a_failure():
    outcome = new_outcome("x", "x")
    for value in (5.0, 5.01, None):
        outcome.below("takes", value, 5, "s")
    assert [promise.verdict for promise in outcome.promises] == [PASS, MISSED, FAIL] and not outcome.holds


def test_growth_is_that_of_the_second_half_and_one_outlier_changes_nothing():
    levels_off = [100, 150, 180, 200, 201, 201, 201, 300, 201, 201]
    assert abs(growth_of_second_half(range(10), levels_off)) < 1
    assert growth_of_second_half(range(10), range(10)) == pytest.approx(4)
    assert growth_of_second_half([0, 1, 2], [1, 2, 3]) == pytest.approx(2)


def test_the_page_keeps_the_rows_of_scripts_that_did_not_run():
    page = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n"
    outcome = new_outcome("x", "python -m bench.torture.x")
    outcome.check("it | serves", True, "yes")
    written = with_sections(page, [outcome], "a CPU")
    assert "old" not in written and "kept" in written and "| it \\| serves | yes |  | PASS |" in written
    assert with_sections(written, [outcome], "a CPU") == written
    with pytest.raises(ValueError, match="no place for z"):
        with_sections(page, [new_outcome("z", "z")], "a CPU")


def test_a_secret_is_found():
    assert found_in(f"x {PROMPT} y {KEY}") == "key, prompt" and not found_in("plain")


ANSWERS = {
    "/done": b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"a":1}\n\ndata: [DONE]\n\n',
    "/error": b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"error":{"code":"lost"}}\n\n',
    "/cut": b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"a":1}\n\n',
    "/429": b"HTTP/1.1 429 No\r\nretry-after: 3\r\ncontent-length: 2\r\n\r\n{}",
    "/silent": None,
}


@pytest.fixture
def scripted():
    """The address of a server that answers by the path."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def answer(reader, writer):
        path = (await reader.readline()).split()[1].decode()
        if ANSWERS[path] is None:
            await asyncio.sleep(30)
        writer.write(ANSWERS[path])
        await writer.drain()
        writer.close()

    async def start():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        found.append(server.sockets[0].getsockname()[1])
        ready.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True)
    thread.start()
    assert ready.wait(5)
    yield f"http://127.0.0.1:{found[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.mark.server
def test_the_client_process_tells_how_each_call_ended(scripted):
    calls = [Call({}, path=path, group=path, timeout_s=0.5) for path in ANSWERS]
    found = call_all(scripted, calls, [Loop(Call({}, path="/done", group="loop", name="k"), 2, 0.3)])
    ends = {answer.group: answer.end for answer in found.answers}
    assert ends == {"/done": "done", "/error": "error", "/cut": "cut", "/429": "done", "/silent": "timeout",
                    "loop": "done"}  # fmt: skip
    (limited,) = found.of("/429")
    assert (limited.status, limited.retry_after) == (429, "3") and found.of("/error")[0].code == "lost"
    names = [answer.name for answer in found.of("loop")]
    assert len(names) == len(set(names)) > 2
    assert call_all("http://127.0.0.1:9", [Call({})]).answers[0].end == "refused"
