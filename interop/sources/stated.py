"""What a page of /metrics states of its server: settings, in the labels of gauges of information, and the version."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sojourn.interop.sources.names import canonical
from sojourn.interop.sources.registry import recognise

INFORMATION = ("cache_config_info", "config_info", "server_info")  # ends of names of such gauges
# Labels that name a place
NOT_SETTINGS = ("engine", "model_name", "dp_rank", "tp_rank", "pp_rank", "instance", "job", "pod", "namespace")

Stated = str | bool | int | float


def settings_stated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Stated]:
    """By the server's own names. `rows` are those of `page.rows_of`."""
    found: dict[str, Stated] = {}
    for row in rows:
        if canonical(row["name"]).endswith(INFORMATION):
            labels = dict(row["labels"])
            found |= {label: _plain(text) for label, text in labels.items() if _is_setting(label, text)}
    return found


def settings_in_our_words(rows: Sequence[Mapping[str, Any]]) -> dict[str, Stated]:
    """By our names, where both mean the same."""
    source = recognise({row["name"] for row in rows})
    ours = {each.label: name for name, each in source.setting_gauges.items() if each.label} if source else {}
    return {ours.get(label, label): value for label, value in settings_stated(rows).items()}


def version_stated(rows: Sequence[Mapping[str, Any]]) -> str | None:
    found = (dict(row["labels"]).get("version") for row in rows if row["name"].endswith("build_info"))
    return next((version for version in found if version), None)


def _is_setting(label: str, text: str) -> bool:
    return label not in NOT_SETTINGS and not label.startswith("_") and text not in ("None", "")


def _plain(text: str) -> Stated:
    if text in ("True", "False", "true", "false"):
        return text.lower() == "true"
    try:
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        return text
