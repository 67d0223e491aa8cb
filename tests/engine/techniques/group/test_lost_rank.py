"""A rank that dies or stands still: streams end with an error in time, and another group serves, without an orphan."""

import json
import os
import signal
import time

import httpx
import psutil
import pytest

from tests.engine.server_process import Running, serving
from tests.further import further

pytestmark = [pytest.mark.server, pytest.mark.slow]
ASKED = {"model": "tiny-model", "prompt": "The", "max_tokens": 3000, "stream": True, "ignore_eos": True}
HUNG_SECONDS = 2.0  # the least that the setting takes
NOTICED_SECONDS = 0.9  # a beat before the silence begins, a look of the watch, and the way to the client


def ranks(server: Running) -> list[psutil.Process]:
    """Of the group that computes now."""
    return [each for each in psutil.Process(server.core_pid()).children() if each.name().startswith("sojourn-rank")]


@pytest.mark.parametrize(
    ("layout", "sent", "within_s"),
    [
        ("--tensor-parallel", signal.SIGSTOP, HUNG_SECONDS + NOTICED_SECONDS),
        ("--tensor-parallel", signal.SIGKILL, 1.0),
        *further(("--pipeline-parallel", signal.SIGSTOP, HUNG_SECONDS + NOTICED_SECONDS),
                 ("--pipeline-parallel", signal.SIGKILL, 1.0)),
    ],
)  # fmt: skip
def test_lost_rank_ends_streams_in_time_and_its_group_is_replaced(tmp_path, layout, sent, within_s):
    hung = ("--core-hung-seconds", str(HUNG_SECONDS), "--core-silence-seconds", "2")
    with serving(tmp_path, "tiny-model", layout, "2", *hung) as server:
        (lost,) = ranks(server)
        core = psutil.Process(server.core_pid())
        with httpx.stream("POST", f"{server.url}/v1/completions", json=ASKED, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(lost.pid, sent)
            begin = time.monotonic()
            rest = [line for line in lines if line]
            took = time.monotonic() - begin
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_core_died"
        assert "[DONE]" not in "".join(rest)
        assert took < within_s
        assert sent == signal.SIGKILL or took > HUNG_SECONDS - 1.1, "a rank that is only late is not lost"
        _, alive = psutil.wait_procs([core, lost], timeout=2)
        assert not alive, "a stopped process ends, too"
        server.wait_ready()
        answer = httpx.post(f"{server.url}/v1/completions", json=ASKED | {"stream": False, "max_tokens": 3}, timeout=30)
        assert answer.status_code == 200
        (other,) = ranks(server)
        assert other.pid != lost.pid
        sign = "was killed by signal 9" if sent == signal.SIGKILL else "gave no sign of life for 2 s"
        assert f"rank 1 of the parallel group {sign}" in server.log.read_text()
    assert not other.is_running()
