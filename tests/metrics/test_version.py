import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import sojourn.metrics.version as ours
from sojourn.metrics.machine.host import versions


def test_a_checkout_that_is_not_installed_knows_its_version(monkeypatch):
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(ours, "version", absent)
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    assert ours.own_version() == versions()["sojourn"] == project["version"]
