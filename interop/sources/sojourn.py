"""Our own server through the same door: for one whose run directory is out of reach. Every family is itself."""

from sojourn.interop.sources.source import Latency, Sight, Source, Span, Term, Translation, count_of, sum_of, unseen
from sojourn.metrics.catalog.catalog import CATALOG
from sojourn.metrics.ledger import SERVER_ACCOUNTS

LEDGER, TTFT_LEDGER = "sojourn_request_ledger_seconds_total", "sojourn_request_ttft_ledger_seconds_total"
FINISHED = (Term("sojourn_request_finished_total"),)
E2E = "sojourn_request_e2e_seconds"


def _span(account: str) -> Span:
    where = (("account", account),)
    first_tokens = count_of("sojourn_request_ttft_seconds")
    return Span(account, (account,), (Term(LEDGER, where),), FINISHED, (Term(TTFT_LEDGER, where),), first_tokens,
                "sum over the run of the account")  # fmt: skip


SOJOURN = Source(
    key="sojourn",
    title="Sojourn",
    version="this version",
    prefix="sojourn_",
    oldest="this version",
    translations=tuple(
        Translation(
            metric.name,
            ((Term(metric.name),),),
            same_labels=metric.labels,
            largest=metric.kind == "gauge" and metric.unit == "ratio",
        )
        for metric in CATALOG
    ),
    spans=tuple(_span(info.name) for info in SERVER_ACCOUNTS),
    latency=Latency(sum_of(E2E), count_of(E2E), ("client.network",)),
    sights={
        **{info.name: Sight("seen", "a sum over the run; per request only in the records") for info in SERVER_ACCOUNTS},
        "compute.stall": unseen(
            "records of steps show it afterwards; in the metrics it lies in the accounts of a step"
        ),
        "request.routing": unseen("it takes the client's clock, which only the records of a run have"),
        "client.network": unseen("not available: it needs the server's records of each request"),
    },
    settings={
        "batch cap": "--max-num-seqs",
        "KV block pool": "--num-kv-blocks, --memory-fraction",
        "prefix cache": "--prefix-caching",
        "block": "--block-size",
    },
)
