"""What a server that others started says of itself beside its model, for `run.json`."""

import json
from contextlib import suppress
from typing import Any

from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.stated import settings_in_our_words, version_stated
from sojourn.loadgen.target.endpoint import Endpoint, EndpointError, get
from sojourn.metrics.compare.settings import STATED
from sojourn.metrics.run.directory import section


def stated_facts(meta: dict[str, Any], endpoint: Endpoint, page: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings from its page of /metrics, and its version from there or from /version. {} of our own engine, which
    says it all in /v1/models."""
    engine = section(meta, "engine")
    if section(section(engine, "served"), "engine") or "base_url" not in engine:
        return {}
    source, version = recognise({row["name"] for row in page}), version_stated(page) or _version(endpoint)
    found: dict[str, Any] = {STATED: stated} if (stated := settings_in_our_words(page)) else {}
    return found | ({"server_versions": {source.key if source else "server": version}} if version else {})


def _version(endpoint: Endpoint) -> str | None:
    with suppress(EndpointError, ValueError, KeyError, TypeError):
        status, body = get(endpoint, "/version")
        return str(json.loads(body)["version"]) if status == 200 else None
    return None
