"""`sojourn otlp`: spans of vLLM and SGLang, received and joined to the requests of a client."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sojourn.commands.cli import RunArgument, open_run, out, print_json, table
from sojourn.commands.help_page import HelpPage

otlp = HelpPage(help="Spans of vLLM and SGLang: receive them, and join them to a client's requests.")


@otlp.command()
def receive(
    output: Annotated[Path, typer.Argument(help="file to write; what is there stays")] = Path("spans.binpb"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on 127.0.0.1")] = 4318,
) -> None:
    """Receive traces over OTLP/HTTP (protobuf) into a file, until Ctrl-C."""
    from sojourn.interop.imported.otlp_receiver import PATH, Receiver

    receiver = Receiver(port, output)
    out.print(f"takes traces at http://127.0.0.1:{port}{PATH} (Ctrl-C ends it); the server needs\n"
              "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf and --otlp-traces-endpoint with this address",
              markup=False, soft_wrap=True)  # fmt: skip
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        pass
    finally:
        receiver.close()
        out.print(f"{receiver.messages:,} messages are in {output}", markup=False, soft_wrap=True)
        if receiver.refused:
            out.print(f"! {receiver.refused:,} posts were refused: no protobuf of traces", markup=False)


@otlp.command()
def join(
    file: Annotated[Path, typer.Argument(help="spans as OTLP, in JSON or protobuf: of a collector's file exporter, or "
                                         "of `sojourn otlp receive`")],
    run: RunArgument,
    request: Annotated[str | None, typer.Option(help="show this request alone")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:  # fmt: skip
    """Join spans to a client's run by X-Request-Id or traceparent, and show where the time of its requests went."""
    import msgspec

    from sojourn.interop.imported.otlp import join_spans, read_joined, summary
    from sojourn.interop.imported.otlp_file import read_spans
    from sojourn.metrics.errors import InputError

    opened = open_run(run)
    joined = join_spans(opened, read_spans(file), file.name)
    rows = read_joined(opened)
    if request is not None:
        rows = rows[rows.request_id == request]
        if rows.empty:
            raise InputError(f"no span in {file} is of the request {request}")
    parts = summary(rows)
    if as_json:
        print_json({"joined": joined, "matched": joined.matched, "parts": parts})
        return
    show(msgspec.structs.asdict(joined) | {"matched": joined.matched}, parts, request)


def show(joined: dict[str, Any], parts: list[Any], request: str | None) -> None:
    out.print(
        f"{joined['matched']:,} of {joined['requests']:,} requests are joined to spans of {joined['engine']}: "
        f"{joined['by_request_id']:,} by X-Request-Id, {joined['by_traceparent']:,} by traceparent",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    columns = ("ms",) if request else ("mean, ms", "p50", "p99", "all time", "excess of the slowest tenth")
    found = table("part", *columns, text=("part",))
    for each in parts:
        figures = (_ms(each.mean_ms), _ms(each.p50_ms), _ms(each.p99_ms), _share(each.share), _share(each.excess_share))
        found.add_row(each.part, *(figures[:1] if request else figures))
    out.print(found)
    out.print("evidence level: request spans. No span tells apart", markup=False)
    for account, place in joined["unseen_accounts"].items():
        out.print(f"  {account}: its time lies in {place}", markup=False)


def _ms(value: float | None) -> str:
    return "unseen" if value is None else f"{value:,.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
