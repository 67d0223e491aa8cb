"""Which Sojourn this is."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def own_version() -> str:
    """Of Sojourn as it is installed, or of the checkout that runs without being installed."""
    try:
        return version("sojourn")
    except PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
