"""A server under record: started or found, its log and pages kept, its end told, and nothing of it ended that is not
ours."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.live.record.command_line import read_command
from sojourn.live.record.found import by_pid
from sojourn.live.record.log import LogFollower
from sojourn.live.record.recording import Recording
from sojourn.live.watch.recorder import Recorders
from sojourn.live.watch.watcher import Watcher
from sojourn.metrics.errors import InputError, RunDataError, ServerError
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.foreign import VllmPage
from tests.metrics.live_pages import page, pages, serving

pytestmark = pytest.mark.server
SERVER = """
import http.server, sys
PAGE = open(sys.argv[1], "rb").read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(PAGE)
    def log_message(self, *_): print("asked for", self.path)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open(sys.argv[2], "w").write(str(server.server_port))
print("a line of the server")
try:
    server.serve_forever(0.02)
except KeyboardInterrupt:
    print("the last line")
"""


def until(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.fixture
def words(tmp_path) -> list[str]:
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    (tmp_path / "page").write_bytes(VllmPage().render())
    return [sys.executable, str(tmp_path / "server.py"), str(tmp_path / "page"), str(tmp_path / "port")]


def port_of(tmp_path: Path) -> int:
    return int(until(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text()))


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_server_that_is_started_is_recorded_to_its_last_line(tmp_path, words):
    words = [
        *words[:1],
        "-c",
        SERVER.replace('("127.0.0.1", 0)', f'("127.0.0.1", {(port := free_port())})'),
        *words[2:],
    ]
    shown = bytearray()
    recording = Recording(tmp_path / "run", {"ttft_ms": 500.0}, 10.0, shown.extend)
    recording.start(read_command(words, f"http://127.0.0.1:{port}"), uses_probe=True)
    until(lambda: recording.has_answered)
    ended = recording.end()
    assert ended.exit_code == 0 and not ended.problems
    log = ended.log.read_bytes()
    assert log == bytes(shown) and b"a line of the server" in log and b"the last line" in log
    meta = RunDirectory.open(tmp_path / "run").meta()
    assert meta["recorded"]["command"] == words and meta["objectives"][0]["ttft_ms"] == 500.0
    assert "vllm:num_requests_running" in set(ended.run.table("scrapes").name)


def test_a_server_that_ends_before_it_answers_leaves_its_log(tmp_path):
    recording = Recording(tmp_path / "run", {}, 10.0)
    recording.start(read_command([sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"], "http://127.0.0.1:9"),
                    uses_probe=True)  # fmt: skip
    until(lambda: recording.is_over)
    ended = recording.end()
    assert ended.run is None and ended.exit_code == 3 and ended.log.read_text() == "no GPU\n"


def test_a_command_that_is_none_and_a_folder_that_is_taken_are_refused(tmp_path):
    with pytest.raises(ServerError, match="cannot be started"):
        Recording(tmp_path / "a", {}, 10.0).start(read_command(["./none"], "http://127.0.0.1:9"), uses_probe=False)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text("{}")
    with pytest.raises(RunDataError, match="already holds a run"):
        Recording(tmp_path / "b", {}, 10.0)


def test_a_server_that_runs_is_found_by_its_process_and_runs_on(tmp_path, words):
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*words[:1], "-u", *words[1:]], stdout=log, start_new_session=True)
    try:
        port = port_of(tmp_path)
        found = by_pid(process.pid)
        assert found.url == f"http://127.0.0.1:{port}" and found.log == tmp_path / "log"
        recording = Recording(tmp_path / "run", {}, 10.0)
        recording.find(found)
        until(lambda: recording.has_answered)
        ended = recording.end()
        assert ended.exit_code is None and process.poll() is None and b"asked for" in ended.log.read_bytes()
        assert ended.run.meta()["recorded"]["pid"] == process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    with pytest.raises(InputError, match="no process"):
        by_pid(process.pid)


def test_a_process_that_listens_nowhere_is_told():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(InputError, match="listens at no port"):
            by_pid(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_log_is_followed_from_its_end_and_over_a_rotation(tmp_path):
    log, copy = tmp_path / "log", tmp_path / "copy"
    log.write_text("old\n")
    follower = LogFollower(copy)
    follower.follow(log)
    until(copy.exists)
    with log.open("a") as file:
        file.write("new\n")
    until(lambda: copy.read_text() == "new\n")
    log.write_text("r\n")
    until(lambda: copy.read_text() == "new\nr\n")
    follower.stop()
    assert follower.lost_bytes == 0


def test_a_log_goes_on_where_nobody_looks_any_more(tmp_path):
    """Else the server's pipe is full after 64 KiB, and the server stands."""

    def show(_: bytes) -> None:
        raise BrokenPipeError

    follower = LogFollower(tmp_path / "copy", show)
    code = "import sys\nfor _ in range(4): sys.stdout.write('x' * 65536); sys.stdout.flush()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    follower.follow(process.stdout)
    until(lambda: process.poll() is not None)
    follower.stop()
    assert (tmp_path / "copy").stat().st_size == 4 * 65536 and follower.lost_bytes == 0


def test_a_watch_records_every_server_with_the_scrapes_that_failed(tmp_path):
    state = {"up": True}
    answer = pages(page())
    with serving(lambda path: answer(path) if state["up"] else None) as url:
        recorders = Recorders(tmp_path, {})
        watcher = Watcher([url], interval_s=0.05, record=recorders).start()
        until(lambda: recorders.has_runs)
        state["up"] = False
        until(lambda: watcher.watch().state == "unreachable")
        watcher.stop()
    [run] = recorders.close()
    table = run.table("scrapes")
    assert run.path.parent == tmp_path and run.name.startswith("live-")
    assert set(table[table.name == "up"].value) == {0.0, 1.0}
    assert len(set(table.name)) > 10  # all of the page, and not what a verdict reads


def test_a_folder_that_takes_nothing_ends_the_record_and_no_watch(tmp_path):
    (tmp_path / "file").write_text("")
    with serving(pages(page())) as url:
        watcher = Watcher([url], interval_s=0.05, record=Recorders(tmp_path / "file", {})).start()
        until(lambda: watcher.record_problem)
        until(lambda: watcher.watch().servers[0].scrapes > 2)
        watcher.stop()
    assert "cannot be written" in watcher.record_problem


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no server is named"), (["--pid", "1", "--unit", "x"], "one server"), (["--", "./start.sh"], "--base-url"),
        (["--base-url", "http://127.0.0.1:9", "--log", "none.log"], "no file"),
        (["--log", "a.log", "--", "vllm", "serve", "m"], "--log is of a server that runs"),
    ],
)  # fmt: skip
def test_wrong_use_is_told(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["record", *arguments])
    assert isinstance(result.exception, InputError) and says in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_what_never_answers_fails_with_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app,
        [
            "record",
            "--base-url",
            "http://127.0.0.1:9",
            "--output",
            "run",
            "--",
            sys.executable,
            "-c",
            "print('no GPU')",
        ],
    )
    assert result.exit_code == 1
