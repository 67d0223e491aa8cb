"""The Kubernetes manifests of `scale/`, as data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("scale/kubernetes", "scale/llm-d/single", "scale/llm-d/prefill-decode")


def objects(folder: str) -> list[dict[str, Any]]:
    """Every object of a folder, file by file."""
    files = sorted((ROOT / folder).glob("*.yaml"))
    return [item for file in files for item in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def every_object() -> list[dict[str, Any]]:
    rules = ROOT / "dashboards/generated/prometheus_rule.yaml"
    return [item for folder in FOLDERS for item in objects(folder)] + [yaml.safe_load(rules.read_text("utf-8"))]


def pods(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and template of everything that makes pods."""
    for item in objects(folder):
        if item["kind"] in ("Deployment", "StatefulSet"):
            yield item["metadata"]["name"], item["spec"]["template"]


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def servers(folder: str) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Name, template and settings of every server of ours; a setting that stands alone is on."""
    for name, template in pods(folder):
        for container in containers(template):
            if container.get("command") == ["sojourn"]:
                verb, model, *flags = container["args"]
                assert verb == "serve" and all(flag.startswith("--") for flag in flags)
                pairs = (flag.removeprefix("--").partition("=") for flag in flags)
                yield name, template, {"model": model} | {key.replace("-", "_"): value for key, _, value in pairs}
