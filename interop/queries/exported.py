"""What a server exports: families, their types, labels and values, of one or several pages of /metrics."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.sources.names import canonical
from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.source import Source
from sojourn.metrics.errors import InputError

GENERIC = {"python", "process", "go", "promhttp", "http", "scrape", "up"}  # of libraries, on pages of many servers
PARTS = ("_bucket", "_sum", "_count", "_created")


@dataclass(slots=True)
class Exported:
    """`samples`: name → label → its values; `types`: family → type, of families without a series, too."""

    samples: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)

    def type_of(self, sample: str) -> str:
        """`counter`, `gauge`, `histogram` …; "" where the page does not say."""
        for family in (sample, sample.removesuffix("_total"), *(sample.removesuffix(part) for part in PARTS)):
            if family in self.types:
                return self.types[family]
        return ""

    def has_family(self, name: str) -> bool:
        return name in self.types or f"{name}_total" in self.types or name.removesuffix("_total") in self.types

    def matching(self, pattern: str) -> list[str]:
        """Names that a pattern of `__name__` fits. PromQL's patterns are anchored."""
        try:
            wanted = re.compile(pattern)
        except re.error:
            return []
        return [name for name in self.samples if wanted.fullmatch(name)]

    @property
    def namespaces(self) -> set[str]:
        """The beginnings of names that are this server's own: `vllm`, `sglang` …"""
        return {namespace(name) for name in (*self.samples, *self.types)} - GENERIC


def namespace(name: str) -> str:
    """`vllm` of `vllm:num_requests_running`; `node` of `node_cpu_seconds_total`."""
    return re.split(r"[:_]", name.removeprefix("ray_"), maxsplit=1)[0]


def read_exported(pages: Iterable[tuple[str, str]]) -> Exported:
    """`pages`: name and text of each. Raises InputError where one is no page of /metrics."""
    found = Exported()
    for name, text in pages:
        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, KeyError, IndexError) as error:
            raise InputError(f"{name} is no page of /metrics in Prometheus' text format: {error}") from None
        if not families:
            raise InputError(f"{name} is a page of /metrics without a family")
        for family in families:
            found.types.setdefault(family.name, family.type)
            for sample in family.samples:
                labels = found.samples.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
        source = recognise({canonical(sample.name) for family in families for sample in family.samples})
        if source is not None and source not in found.sources:
            found.sources.append(source)
    return found
