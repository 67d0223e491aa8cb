import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import sojourn.metrics.machine.host as host


def test_a_checkout_that_is_not_installed_knows_its_version(monkeypatch):
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(host, "version", absent)
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    assert host.own_version() == host.versions()["sojourn"] == project["version"]
