"""`sojourn lint DASHBOARD|RULES --metrics URL|FILE`: panels and alerts that a server cannot answer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from sojourn.commands.cli import need, out, print_json
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.interop.queries.judge import QueryReport
    from sojourn.interop.queries.read import Query

LARGEST_FILE = 64 << 20  # bytes
TIMEOUT_S = 10.0
MOST_OWNERS = 3  # that are listed
STYLES = {"high": "red", "medium": "yellow", "low": "dim"}
HEADS = {"high": "no answer", "medium": "misleading", "low": "empty now"}


def is_dashboard(target: str) -> bool:
    """Whether a file looks like a dashboard or rules. A trace in JSON lines has prompts, which may say anything."""
    path = Path(target)
    if path.suffix not in (".json", ".yaml", ".yml") or not path.is_file():
        return False
    head = path.read_bytes()[:LARGEST_FILE].decode("utf-8", "replace")
    if path.suffix == ".json":
        try:
            return isinstance(document := json.loads(head), dict) and bool(
                {"panels", "rows", "dashboard", "templating", "elements", "groups"} & {*document, *_spec(document)}
            )
        except (json.JSONDecodeError, RecursionError):
            return False
    return "expr:" in head or '"expr"' in head


def _spec(document: dict) -> dict:
    spec = document.get("spec")
    return spec if isinstance(spec, dict) else {}


def lint_queries(targets: list[str], pages: list[str], strict: bool, as_json: bool) -> Ended:
    """Prints what is found. Raises InputError for what cannot be read, ServerError for a page without an answer."""
    need("promql_parser")
    from sojourn.interop.queries.exported import read_exported
    from sojourn.interop.queries.judge import judge
    from sojourn.interop.queries.read import read_queries

    if not pages:
        raise InputError(f"{targets[0]} is a dashboard or a file of rules: name what its queries are judged by, "
                         "--metrics http://SERVER/metrics, or a saved page")  # fmt: skip
    exported = read_exported((page, _page(page)) for page in pages)
    queries: list[Query] = []
    other = 0
    for target in targets:
        read = read_queries(_text(target), target)
        queries += read.found
        other += read.other
    report = judge(queries, exported, other)
    if as_json:
        print_json(report)
    else:
        _print(report, targets, pages)
    return Ended.FAILED if strict and report.findings else Ended.DONE


def _text(name: str) -> str:
    path = Path(name)
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise InputError(f"{name} is larger than 64 MiB")
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{name} is not UTF-8 text") from None


def _page(name: str) -> str:
    if "://" not in name:
        return _text(name)
    from sojourn.live.watch.fetch import fetch
    from sojourn.metrics.errors import ServerError

    url = name if name.rstrip("/").endswith("/metrics") else f"{name.rstrip('/')}/metrics"
    status, body = fetch(url, TIMEOUT_S)
    if status != 200:
        raise ServerError(f"{url} answers {status}")
    return body.decode("utf-8", "replace")


def _print(report: "QueryReport", targets: list[str], pages: list[str]) -> None:
    server = " and ".join(report.servers) or "a server of no known kind"
    out.print(f"{report.answered} of {report.judged} queries of {', '.join(targets)} can be answered by {server} "
              f"({report.families} families, {', '.join(pages)}).", markup=False)  # fmt: skip
    for each in report.findings:
        head = Text(f"\n{HEADS[each.severity]}", STYLES[each.severity])
        out.print(
            head.append(f" {each.asked}: {each.says}\n  fix: {each.fix}\n  in: {_owners(each.owners)}", "default")
        )
    notes = [
        (report.queries - report.judged, "queries are not judged: they ask other exporters, or a variable chooses"),
        (report.other_sources, "queries of other data sources than Prometheus are not judged"),
    ]
    for count, says in notes:
        if count:
            out.print(f"note: {count} {says}", style="dim", markup=False)
    if report.elsewhere:
        names = list(report.elsewhere)
        more = f" and {len(names) - MOST_OWNERS} more" if len(names) > MOST_OWNERS else ""
        out.print(f"note: not of this server: {', '.join(names[:MOST_OWNERS])}{more}; name the page of each exporter "
                  "with another --metrics", style="dim", markup=False)  # fmt: skip


def _owners(owners: list[str]) -> str:
    more = len(owners) - MOST_OWNERS
    return ", ".join(owners[:MOST_OWNERS]) + (f" and {more} more" if more > 0 else "")
