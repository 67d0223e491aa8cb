"""`sojourn serve`: the engine behind an OpenAI-compatible API."""

from typing import Any

from commands.cli import need
from engine.options import engine_config, engine_options


@engine_options
def serve(**settings: Any) -> None:
    """Serve a model: OpenAI-compatible API, Prometheus metrics at /metrics."""
    need("engine")
    from engine.server.serve import serve as run_server

    run_server(engine_config(settings))
