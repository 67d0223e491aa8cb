"""`sojourn join`: what a server recorded on another host, or the spans that it sent, and the records of its client."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sojourn.commands.cli import open_run, out, print_json, table
from sojourn.commands.summary import summarise
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory

SPANS = Path("spans.binpb")
PORT = 4318


def join(
    run: Annotated[
        Path | None, typer.Argument(metavar="CLIENT_RUN", help="run directory of the client (sojourn load)")
    ] = None,
    other: Annotated[
        Path | None,
        typer.Argument(
            metavar="SERVER_RUN|SPANS",
            help="run directory of the server (sojourn serve --run-dir), copied to this host; or a file of spans as "
            "OTLP, in JSON or protobuf: of a collector's file exporter, or of --receive",
        ),
    ] = None,
    receive: Annotated[
        bool,
        typer.Option("--receive", help=f"receive spans over OTLP/HTTP into a file (by default {SPANS}), until Ctrl-C"),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help=f"port of --receive on 127.0.0.1; by default {PORT}")
    ] = None,
    request: Annotated[str | None, typer.Option(help="of spans: show this request alone")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="of spans: print JSON")] = False,
) -> None:
    """Join the records of a server on another host to its client's run, and show how far their clocks agree.

    With spans of vLLM or SGLang: join them by X-Request-Id or traceparent, and show where the time of the requests
    went. `sojourn join --receive [SPANS]` receives them.
    """
    if receive:
        if other is not None or request is not None or as_json:
            raise InputError("--receive takes one file to write; join it to a run afterwards")
        _receive(run or SPANS, PORT if port is None else port)
        return
    if run is None or other is None:
        raise InputError("give the client's run, and the server's run or a file of spans; or --receive")
    if port is not None:
        raise InputError("--port is of --receive; add it, or leave --port out")
    if run.is_file():
        run, other = other, run
    client = open_run(run)
    if other.is_file():
        _join_spans(client, other, request, as_json)
    elif request is not None or as_json:
        raise InputError(f"{other} is no file of spans, and --request and --json are of spans; leave them out")
    else:
        _join_server(client, other)


def _join_server(client: "RunDirectory", server_run: Path) -> None:
    from sojourn.metrics.run.join import join_runs, uncertainty_sentence

    joined = join_runs(client, open_run(server_run))
    out.print(f"{joined.matched} of {joined.of} requests are joined in {client.path}")
    out.print(uncertainty_sentence(client.meta()) or "both ran on one host and share its clock")
    raise typer.Exit(summarise(client))


def _receive(output: Path, port: int) -> None:
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


def _join_spans(client: "RunDirectory", file: Path, request: str | None, as_json: bool) -> None:
    import msgspec

    from sojourn.interop.imported.otlp import join_spans, read_joined, summary
    from sojourn.interop.imported.otlp_file import read_spans

    joined = join_spans(client, read_spans(file), file.name)
    rows = read_joined(client)
    if request is not None:
        rows = rows[rows.request_id == request]
        if rows.empty:
            raise InputError(f"no span in {file} is of the request {request}")
    parts = summary(rows)
    if as_json:
        print_json({"joined": joined, "matched": joined.matched, "parts": parts})
        return
    _show(msgspec.structs.asdict(joined) | {"matched": joined.matched}, parts, request)


def _show(joined: dict[str, Any], parts: list[Any], request: str | None) -> None:
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
