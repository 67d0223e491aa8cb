"""`sojourn serve`: the engine behind an OpenAI-compatible API."""

from typing import Annotated, Any

import typer

from sojourn.commands.cli import need, out, table
from sojourn.engine.options import assignments, engine_config, engine_options

CheckOption = Annotated[
    bool,
    typer.Option("--check", help="check model, memory, files and port, print the memory plan, and serve nothing"),
]

ServeSetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="a setting, as `sojourn run --set` takes it; repeatable"),
]


@engine_options
def serve(check: CheckOption = False, set_: ServeSetOption = None, **settings: Any) -> None:
    """Serve a model: OpenAI-compatible API, Prometheus metrics at /metrics."""
    need("engine")
    config = engine_config(settings | assignments(set_ or [], "--set"))
    if check:
        _print_plan(config)
        return
    from sojourn.engine.server.serve import serve as run_server

    run_server(config)


def _print_plan(config: Any) -> None:
    from sojourn.engine.check import check
    from sojourn.engine.config import model_folder
    from sojourn.engine.token.generation_config import sampling_defaults
    from sojourn.metrics.memory.plan import shown_bytes

    plan = check(config)
    rows = table("memory for", "bytes", text=("memory for",))
    for purpose, size in plan.parts.items():
        rows.add_row(purpose, shown_bytes(size))
    rows.add_row("in all", shown_bytes(plan.total_bytes))
    rows.add_row("free now", shown_bytes(plan.free_bytes))
    out.print(rows)
    if (sentence := sampling_defaults(model_folder(config.model), config.generation_config).sentence()) is not None:
        out.print(sentence)
    out.print(f"{plan.num_kv_blocks:,} KV blocks hold {plan.kv_tokens:,} tokens. {config.model} can be served.")
