"""The PromQL of a Grafana dashboard or of a file of rules, whatever its schema.

A dashboard (classic, v2, exported or from the API), rules of Prometheus, a PrometheusRule, alerts of Grafana and a
ConfigMap that holds one of them have one thing in common: a mapping with `expr`. So the documents are walked, and not
read by schema.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from sojourn.metrics.errors import InputError

NAMES = ("alert", "record", "title", "name")  # of what a query belongs to, the nearest one
PROMETHEUS = ("prometheus", "mimir", "thanos", "victoriametrics", "amazonprometheus", "azureprometheus")
_OF_LABEL = re.compile(r"^\s*label_values\(\s*(?:(?P<metric>.+),\s*)?(?P<label>[\w$]+)\s*\)\s*$", re.DOTALL)
_OF_QUERY = re.compile(r"^\s*query_result\((?P<expr>.+)\)\s*$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and where it stands."""

    owner: str  # 'panel "Running requests"', 'alert "Stuck"', 'variable "model"'
    expr: str  # PromQL, with Grafana's variables
    label: str = ""  # that a variable lists the values of
    record: str = ""  # the name that a rule gives the answer


@dataclass(frozen=True, slots=True)
class Queries:
    """What a document asks. `other`: queries by a data source of another kind, such as Loki, by number."""

    found: tuple[Query, ...]
    other: int


@dataclass(frozen=True, slots=True)
class _Place:
    kind: str = "panel"
    name: str = ""
    source: str = ""  # kind of the data source, "" where the document does not say


def read_queries(text: str, name: str) -> Queries:
    """The queries of a document in JSON or YAML. Raises InputError where it is neither, or asks nothing."""
    documents = list(_documents(text, name))
    found: list[Query] = []
    other = 0
    for document in documents:
        for query in _walk(document, _Place()):
            if query is None:
                other += 1
            else:
                found.append(query)
    if not found and not other:
        raise InputError(f"{name} holds no query: give a Grafana dashboard (JSON) or a file of Prometheus rules (YAML)")
    return Queries(tuple(dict.fromkeys(found)), other)


def is_asking(text: str) -> bool:
    """Whether a text looks like a dashboard or a file of rules."""
    return bool(re.search(r"""["']?\bexpr["']?\s*:|label_values\(""", text))


def _documents(text: str, name: str) -> Iterator[Any]:
    try:
        yield json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            yield from yaml.safe_load_all(text)
        except (yaml.YAMLError, RecursionError) as error:
            templated = " It holds {{ … }} of a chart: render it first (helm template)." if "{{" in text else ""
            raise InputError(f"{name} is neither JSON nor YAML: {' '.join(str(error).split())}.{templated}") from None


def _walk(node: Any, place: _Place) -> Iterator[Query | None]:
    if isinstance(node, list):
        for each in node:
            yield from _walk(each, place)
    elif isinstance(node, dict):
        place = _enter(node, place)
        yield from _asked(node, place)
        for each in node.values():
            yield from _inside(each) if isinstance(each, str) else _walk(each, place)


def _enter(node: dict[str, Any], place: _Place) -> _Place:
    kind, name = place.kind, place.name
    for key in NAMES:
        if isinstance(found := node.get(key), str) and found.strip():
            name = found
            kind = key if key in ("alert", "record") else kind
            break
    if _variable_text(node) is not None:
        kind = "variable"
    elif "targets" in node or node.get("kind") == "Panel":
        kind = "panel"
    elif node.get("kind") == "AnnotationQuery" or {"iconColor", "enable"} <= set(node):
        kind = "annotation"
    elif "condition" in node and isinstance(node.get("data"), list):
        kind = "alert"
    return _Place(kind, name, _source(node) or place.source)


def _source(node: dict[str, Any]) -> str:
    """The kind of data source that a part of a dashboard names: `{"type": "loki"}`, or `group` since v2."""
    given = node.get("datasource")
    kind = given.get("type") if isinstance(given, dict) else None
    if kind is None and node.get("kind") == "DataQuery":
        kind = node.get("group")
    return kind if isinstance(kind, str) else ""


def _asked(node: dict[str, Any], place: _Place) -> Iterator[Query | None]:
    is_other = bool(place.source) and not any(known in place.source.lower() for known in PROMETHEUS)
    owner = f'{place.kind} "{" ".join(place.name.split())}"' if place.name else f"a {place.kind} without a name"
    if isinstance(expr := node.get("expr"), str) and expr.strip():
        yield None if is_other else Query(owner, expr, record=str(node.get("record") or ""))
    if (text := _variable_text(node)) is not None and not is_other:
        if (of_label := _OF_LABEL.match(text)) is not None:
            if of_label["metric"]:
                yield Query(owner, of_label["metric"], label=of_label["label"])
        elif (of_query := _OF_QUERY.match(text)) is not None:
            yield Query(owner, of_query["expr"])


def _variable_text(node: dict[str, Any]) -> str | None:
    """What a variable of a dashboard asks: a text, or a mapping with it."""
    query = node.get("query")
    if isinstance(query, dict):
        query = query.get("query") or (query.get("spec") or {}).get("query")
    return query if isinstance(query, str) and ("label_values(" in query or "query_result(" in query) else None


def _inside(text: str) -> Iterator[Query | None]:
    """The queries of a document within a document, as a ConfigMap holds a dashboard."""
    if len(text) > 20 and "\n" in text.strip() and is_asking(text):
        try:
            inner = list(_documents(text, ""))
        except InputError:
            return
        for each in inner:
            if isinstance(each, dict | list):
                yield from _walk(each, _Place())
