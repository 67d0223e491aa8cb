"""The marks `server`, `prometheus`, `browser` and `compiler`, a bare machine (`--bare`), the cap of property tests
(`--max-examples`), long tests (`--quick`), and the order of files for parallel workers (`--dist loadfile
--no-loadscope-reorder`)."""

import gc
import os
import signal
import tempfile
from pathlib import Path

import certifi
import pytest
from hypothesis import is_hypothesis_test, settings

from tests.bare_machine import make_bare
from tests.long_tests import note_long, without_long
from tests.programs import missing

ROOT = Path(__file__).parent
# The longest files. A worker that started one of them last would run alone at the end.
FIRST = [
    "test_main_job.py", "engine/server/test_server.py", "loadgen/run/test_experiment.py", "ui/test_browser.py",
    "engine/server/telemetry/test_run_costs.py", "engine/server/core/test_call_ends.py",
    "loadgen/client/test_client.py", "diagnosis/terminal/test_terminal.py",
    "diagnosis/test_diagnosis.py", "ui/test_app.py", "engine/compute/test_triton_attention.py",
    "diagnosis/test_diagnosis_claims.py",
]  # fmt: skip
# A test that uses one of these fixtures gets the mark.
SERVERS, COMPILED = {"api_server", "tool_server"}, {"library"}


def pytest_configure(config: pytest.Config) -> None:
    """Each new client of httpx reads the authorities that it trusts: 50 ms for all of certifi's. No test speaks TLS, so
    here and in the servers that tests start it is the first one alone."""
    folder = config._folder = tempfile.TemporaryDirectory(prefix="sojourn-tests-")
    first, end, _ = Path(certifi.where()).read_text("ascii", "replace").partition("-----END CERTIFICATE-----")
    file = Path(folder.name) / "authority.pem"
    file.write_text(first[first.index("-----BEGIN") :] + end + "\n")
    os.environ["SSL_CERT_FILE"] = str(file)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a job of a shell in the background: children inherit
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--bare"):
        make_bare(os.environ, Path(folder.name))


settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure of a property
settings.load_profile("no deadline")
gc.disable()  # while modules are imported: nothing of them is garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at the modules again, nor pytest's five at its end: four seconds a worker
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    config._folder.cleanup()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--max-examples", type=int, help="cap of the examples of each property test; `make check` sets 10, and the "
        "default is what each test says",
    )  # fmt: skip
    parser.addoption("--quick", action="store_true", help="leave out the tests of tests/long_tests.txt")
    parser.addoption("--note-long", action="store_true", help="write tests/long_tests.txt from what this run takes")
    parser.addoption(
        "--bare", action="store_true", help="hide Prometheus, browsers, Node, compilers and Docker, and take the home "
        "folder away, as on a machine where nothing is installed",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cap = config.getoption("--max-examples")
    for item in items:
        if SERVERS & set(item.fixturenames):
            item.add_marker(pytest.mark.server)
        if COMPILED & set(item.fixturenames):
            item.add_marker(pytest.mark.compiler)
        for mark in item.iter_markers():
            if reason := missing(mark.name):
                item.add_marker(pytest.mark.skip(reason=reason))
        if cap is not None and is_hypothesis_test(item.obj):
            cap_examples(item.obj, cap)
    places = {ROOT / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    if config.getoption("--quick"):
        items[:], long = without_long(items)
        config.hook.pytest_deselected(items=long)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if config.getoption("--note-long"):
        stats = terminalreporter.stats.values()
        note_long(report for each in stats for report in each if isinstance(report, pytest.TestReport))


def cap_examples(test, cap: int) -> None:
    """Also of a test with `@settings` of its own, which no Hypothesis profile changes, and of a state machine."""
    machine = getattr(test, "__self__", None)
    owner, name = (test, "_hypothesis_internal_use_settings") if machine is None else (type(machine), "settings")
    used = getattr(owner, name)
    setattr(owner, name, settings(used, max_examples=min(cap, used.max_examples)))
