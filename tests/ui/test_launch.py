"""The app starts on this machine only, and refuses what it cannot show with a sentence."""

import socket
import sys

import pytest

from sojourn.metrics.errors import RunDataError, ServerError
from sojourn.ui.launch import APP, app_command, open_app


def test_command_listens_on_this_machine_only_and_names_the_run(runs):
    command = app_command("elsewhere", runs / "chat", 8700)
    assert command[command.index("--server.address") + 1] == "127.0.0.1"
    assert command[command.index("--server.port") + 1] == "8700"
    assert command[command.index("--runs") + 1] == str(runs)
    assert command[command.index("--run") + 1] == "chat"


def test_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDataError, match=r"holds no run\.json"):
        app_command("runs", tmp_path)


def test_port_in_use_is_refused_with_the_way_out(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerError, match="--port"):
            open_app(tmp_path, port=taken.getsockname()[1])


def test_no_file_of_the_app_hides_a_standard_module():
    """Streamlit runs the app as a script, with its folder first on the search path."""
    assert not {path.stem for path in APP.parent.iterdir()} & sys.stdlib_module_names
