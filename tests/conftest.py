"""The mark `server`, and the order of files for parallel workers (`--dist loadfile --no-loadscope-reorder`)."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# The longest files. A worker that started one of them last would run alone at the end.
FIRST = [
    "test_main_job.py", "engine/server/test_server.py", "loadgen/run/test_experiment.py", "ui/test_browser.py",
    "engine/server/telemetry/test_run_costs.py", "engine/server/core/test_call_ends.py",
    "loadgen/client/test_client.py", "metrics/diagnosis/terminal/test_terminal.py",
    "metrics/diagnosis/test_diagnosis.py", "ui/test_app.py", "engine/compute/test_triton_attention.py",
    "metrics/diagnosis/test_diagnosis_claims.py",
]  # fmt: skip
SERVERS = {"api_server", "tool_server"}  # fixtures; a test that uses one gets the mark `server`


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SERVERS & set(item.fixturenames):
            item.add_marker(pytest.mark.server)
    places = {ROOT / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
