"""Which of the addresses of a watch are servers, and which are a Prometheus that scrapes them."""

from collections.abc import Sequence

from sojourn.live.watch.fetch import base_of
from sojourn.live.watch.prometheus import is_prometheus
from sojourn.metrics.errors import InputError, ServerError


def addresses(
    urls: Sequence[str], prometheus: Sequence[str], num_records: int, selects: bool
) -> tuple[list[str], list[str]]:
    """Servers that are read directly, and each Prometheus. Raises InputError where options do not fit them."""
    if not urls and not prometheus:
        raise InputError("no server is named; give an address such as http://127.0.0.1:8000")
    if num_records > len(urls):
        raise InputError(f"{num_records} folders of records are given for {len(urls)} servers; give one a server")
    bases = list(dict.fromkeys(base_of(url) for url in urls))
    stated = list(dict.fromkeys(base_of(url) for url in prometheus))
    found = [base for base in bases if _speaks_prometheus(base)]
    asked = [*found, *stated]
    if num_records and asked:
        raise InputError(
            f"{asked[0]} is a Prometheus, and records belong to a server that is read directly; give the "
            "address of that server alone, or leave --server-run out"
        )
    if selects and not asked:
        raise InputError(
            "--select narrows what is read of a Prometheus, and no Prometheus answers at these addresses; name one "
            "with --prometheus, or leave --select out"
        )
    return [base for base in bases if base not in found], asked


def _speaks_prometheus(base: str) -> bool:
    try:
        return is_prometheus(base)
    except ServerError:
        return False
