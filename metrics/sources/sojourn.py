"""Our own server through the same door: for one whose run directory is out of reach. Every family is itself."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from metrics.catalog.catalog import CATALOG
from metrics.ledger import SERVER_ACCOUNTS
from metrics.sources.source import Latency, Sight, Span, Term, Translation, count_of, sum_of, unseen

LEDGER, TTFT_LEDGER = "sojourn_request_ledger_seconds_total", "sojourn_request_ttft_ledger_seconds_total"
FINISHED = (Term("sojourn_request_finished_total"),)
E2E = "sojourn_request_e2e_seconds"


def _span(account: str) -> Span:
    where = (("account", account),)
    first_tokens = count_of("sojourn_request_ttft_seconds")
    return Span(account, (account,), (Term(LEDGER, where),), FINISHED, (Term(TTFT_LEDGER, where),), first_tokens,
                "sum over the run of the account")  # fmt: skip


class Sojourn:
    key = "sojourn"
    title = "Sojourn"
    facts = "this version"
    translations = tuple(
        Translation(
            metric.name,
            ((Term(metric.name),),),
            keeps=metric.labels,
            largest=metric.kind == "gauge" and metric.unit == "ratio",
        )
        for metric in CATALOG
    )
    spans = tuple(_span(info.name) for info in SERVER_ACCOUNTS)
    latency = Latency(sum_of(E2E), count_of(E2E), ("client.network",))
    sights: Mapping = {
        **{info.name: Sight("seen", "a sum over the run; per request only in the records") for info in SERVER_ACCOUNTS},
        "client.network": unseen("it takes the moments of arrival and of the last write, which only the records have"),
    }
    settings: Mapping = {
        "batch cap": "--max-num-seqs",
        "KV block pool": "--num-kv-blocks, --memory-fraction",
        "prefix cache": "--prefix-caching",
        "block": "--block-size",
    }
    told: Mapping = {}  # its settings come with GET /v1/models

    def recognises(self, names: AbstractSet[str]) -> bool:
        return any(name.startswith("sojourn_") for name in names)

    def speakers(self, series: Sequence[Mapping[str, str]]) -> list[bool]:
        return [True] * len(series)
