"""`sojourn server usage`: who used what, and what it costs."""

import csv
import sys
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape

from sojourn.commands.cli import find_run, out, print_json, table
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.metrics.usage.report import UsageSum

By = StrEnum("By", ["tenant", "model", "day", "key", "status", "route"])


def usage(
    folder: Annotated[
        Path, typer.Argument(help="folder of `serve --usage-dir`, or a run directory that has one")
    ] = Path("usage"),
    by: Annotated[By, typer.Option(help="what a row sums up")] = By.tenant,
    since: Annotated[
        str | None, typer.Option(help="calls from then on: 2026-11-23, 2026-11-23T10:30 (UTC), or an age: 90m, 24h, 7d")
    ] = None,
    until: Annotated[str | None, typer.Option(help="calls before then")] = None,
    prices: Annotated[
        Path | None, typer.Option(help="price list (YAML), in place of the prices in the records")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print rows and totals as JSON")] = False,
    csv_: Annotated[bool, typer.Option("--csv", help="print rows as CSV, without totals")] = False,
) -> None:
    """Sum up the usage records of a server: calls, tokens, device time, energy and prices."""
    from sojourn.metrics.usage.files import usage_folder
    from sojourn.metrics.usage.price_list import load_price_list
    from sojourn.metrics.usage.reader import read_usage
    from sojourn.metrics.usage.report import between, moment, summed, total

    if json and csv_:
        raise InputError("--json and --csv exclude each other; give one of them")
    given = (("--since", since), ("--until", until))
    bounds = [None if text is None else moment(text, option) for option, text in given]
    listed = load_price_list(prices) if prices is not None else None
    read = read_usage(usage_folder(find_run(folder)))
    records = between(read.records, *bounds)
    if listed is not None:
        records = [listed.priced(record) for record in records]
    rows, whole = summed(records, by), total(records)
    if csv_:
        _print_csv(rows, by)
    elif json:
        document = {"by": by, "rows": rows, "total": whole, "unreadable_lines": read.unreadable_lines}
        print_json(msgspec.to_builtins(document))
    else:
        _print_table(rows, whole, by)
        if read.unreadable_lines:
            out.print(f"{read.unreadable_lines} lines were cut off by a kill or a full disk, and are left out")


def _print_csv(rows: list["UsageSum"], by: str) -> None:
    from sojourn.metrics.usage.record import STATUSES
    from sojourn.metrics.usage.report import UsageSum

    names = [name for name in UsageSum.__struct_fields__ if name not in ("group", "by_status")]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([by, *STATUSES, *names])
    for row in rows:
        counts = [row.by_status.get(status, 0) for status in STATUSES]
        writer.writerow([row.group, *counts, *(_exact(getattr(row, name)) for name in names)])


def _exact(value: object) -> object:
    """Sums of milliseconds without the noise of binary fractions: nanoseconds are their unit."""
    return round(value, 6) if isinstance(value, float) else value


def _print_table(rows: list["UsageSum"], whole: "UsageSum", by: str) -> None:
    currency = whole.currency or "price"
    has_joules, has_prices = whole.joules is not None, whole.currency is not None
    has_failures = by != "status"
    names = [by, "calls", *(["not\nanswered"] if has_failures else [])]
    names += ["prompt\ntokens", "of them\ncached", "output\ntokens", "device\nseconds"]
    names += ["joules"] if has_joules else []
    names += [f"{currency} by\ntokens", f"{currency} by\ndevice"] if has_prices else []
    shown = table(*names, text=(by,))
    shown.columns[0].overflow = "fold"  # a name is never cut
    for row in [*rows, whole]:
        counts = [row.calls, *([row.calls - row.by_status.get("answered", 0)] if has_failures else [])]
        counts += [row.prompt_tokens, row.cached_tokens, row.output_tokens]
        amounts = [_amount(None if row.device_ms is None else row.device_ms / 1e3, 3)]
        amounts += [_amount(row.joules, 1)] if has_joules else []
        amounts += [_amount(row.price_of_tokens, 6), _amount(row.price_of_device, 6)] if has_prices else []
        style = "bold" if row is whole else None
        shown.add_row(escape(row.group), *(f"{count:,}" for count in counts), *amounts, style=style)
    if out.measure(shown, options=out.options.update(width=1_000)).maximum > out.width:
        shown.collapse_padding = True  # so that the id of a key stays on one line of 80 columns
    out.print(shown)
    out.print(f"{whole.calls:,} calls: {whole.status_counts}" if whole.calls else "no calls arrived in this time")
    if whole.calls_with_device_ms and not has_joules:
        out.print("joules are unknown: the machine has no power sensor that can be read")


def _amount(value: float | Decimal | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
