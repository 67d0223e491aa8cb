"""The app starts a scenario as a process of its own, shows how far it is, and stops it."""

import shlex
import signal
import sys
import time

import pytest
from streamlit.testing.v1 import AppTest

from sojourn.metrics.errors import InputError
from sojourn.ui.scenario_process import Launcher, bundled, command_of, why_not
from tests.commands.program import parsed
from tests.ui.test_app import APP, messages, opened


def until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_command_is_that_of_the_program_with_each_choice(tmp_path):
    ours = command_of("demo", tmp_path / "x", model="m", settings="max_num_seqs=4\n\n block_size=8 ", seed=3)
    assert ours[1:6] == ["-m", "sojourn", "run", "demo", "--output"] and ours[-1] == "--set=block_size=8"
    assert "--set=model=m" in ours and ours[ours.index("--seed") + 1] == "3"
    load = command_of("demo", tmp_path / "x", base_url="http://127.0.0.1:9", model="m")
    for command in (ours, load):
        assert parsed(shlex.join(["sojourn", *command[3:]]))[1]["output"] == tmp_path / "x"
    assert load[3] == "load" and "--model=m" in load and load[load.index("--base-url") + 1] == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"settings": "--run-dir=/etc"}, "KEY=VALUE"), ({"settings": "max_num_seqs"}, "KEY=VALUE"),
        ({"base_url": "ftp://x"}, "http://"), ({"base_url": "http://x", "settings": "a=1"}, "our own engine"),
    ],
)  # fmt: skip
def test_what_the_program_would_misread_is_refused(tmp_path, choice, reason):
    with pytest.raises(InputError, match=reason):
        command_of("demo", tmp_path / "x", **choice)


@pytest.mark.parametrize("name", ["", "..", "-x", "a b", "a;b"])
def test_a_run_stays_in_the_folder_of_runs(tmp_path, name):
    with pytest.raises(InputError, match="no name of a run"):
        command_of("demo", tmp_path / "x" / name if name != "" else tmp_path / "x y", settings="")


def test_existing_run_is_never_written_over(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(InputError, match="already"):
        command_of("demo", tmp_path / "x")


def test_program_that_refuses_shows_its_sentence_and_its_exit_code(tmp_path):
    launcher = Launcher()
    command = command_of("demo", tmp_path / "x", base_url="http://127.0.0.1:9")
    started = launcher.start(command, tmp_path / "x")
    with pytest.raises(InputError, match="still running"):
        launcher.start(command, tmp_path / "y")
    until(lambda: started.exit_code is not None)
    assert started.exit_code != 0 and any("127.0.0.1:9" in line for line in started.lines())
    assert not launcher.is_busy and not (tmp_path / "y").exists()


def test_process_is_stopped_as_by_ctrl_c_and_ends_with_the_app(tmp_path):
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\nprint('sending')\n"
    launcher = Launcher()
    started = launcher.start([sys.executable, "-uc", f"{code}time.sleep(60)"], tmp_path / "x")
    until(lambda: started.stage() == "sending")
    assert started.exit_code is None and started.requests() == (0, 0)
    launcher.close()
    assert started.exit_code == 130 and started.process.returncode != -signal.SIGKILL


def test_page_offers_every_bundled_scenario_and_shows_the_command(runs, monkeypatch):
    app = opened(runs, "start", "chat", monkeypatch)
    assert not app.exception, app.exception
    assert app.selectbox(key="scenario").options == list(bundled()) and "demo" in bundled()
    app = app.text_area(key="settings").set_value("max_num_seqs=18").run()
    assert not why_not("run") and "--set=max_num_seqs=18" in app.code[0].value
    app = app.text_area(key="settings").set_value("nonsense").run()
    assert not app.exception and "KEY=VALUE" in messages(app) and "start" not in [b.key for b in app.button]


def test_page_offers_a_running_server_where_the_engine_is_not_installed(runs, monkeypatch):
    assert opened(runs, "start", "chat", monkeypatch).radio(key="against").value == "Sojourn's engine"
    monkeypatch.setattr("sojourn.ui.scenario_process.missing", lambda *names: ["torch"] if "engine" in names else [])
    app = opened(runs, "start", "chat", monkeypatch)
    assert app.radio(key="against").value == "a server that runs already" and not app.warning and not app.exception


def test_read_only_app_starts_nothing(runs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["app.py", "--runs", str(runs), "--read-only"])
    app = AppTest.from_file(APP, default_timeout=60).run().switch_page("views/start.py").run()
    assert not app.exception and "--read-only" in messages(app)
    assert [each.key for each in app.selectbox] == ["run"] and "start" not in [each.key for each in app.button]
