"""The order of the suite, for workers that each take a file at a time (`--dist loadfile --no-loadscope-reorder`)."""

from pathlib import Path

# They take longest: begun last, one of them would run alone while the other worker has nothing left to do.
FIRST = [
    "test_main_job.py", "test_server.py", "test_experiment.py", "test_browser.py", "test_run_costs.py",
    "test_call_ends.py", "test_client.py", "test_terminal.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list) -> None:
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(Path(item.fspath).name, len(FIRST)))
