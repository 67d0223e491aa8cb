"""The exporter's page as a foreign parser reads it."""

from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.records import RequestRecord, StepRecord
from sojourn.metrics.steps import Steps

OBJECTIVES = [{"klass": "all", "ttft_ms": 120.0, "source": "test"}, {"klass": "chat", "tpot_ms": 30.0}]


def scraped(exporter: Exporter) -> dict[tuple[str, frozenset], float]:
    """(sample name, labels without the model) → value, as a foreign parser reads the page."""
    samples = {}
    for family in text_string_to_metric_families(exporter.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: dict, name: str, **labels: str) -> float:
    return samples[f"sojourn_{name}", frozenset(labels.items())]


def fed(steps: list[StepRecord], requests: list[RequestRecord], objectives=OBJECTIVES) -> dict:
    exporter = Exporter("tiny", objectives)
    if steps:
        exporter.observe_steps(Steps(steps))
    for request in requests:
        exporter.observe_request(request)
    return scraped(exporter)
