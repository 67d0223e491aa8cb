"""GET /get_load, /server_info and /query: how busy a server is, and what it is, for the router in front of it."""

from typing import Any

from fastapi import FastAPI

from sojourn.engine.messages import Ready
from sojourn.engine.server.errors import Rejection
from sojourn.engine.server.service import Service
from sojourn.engine.techniques.handover.settings import gives
from sojourn.metrics.machine.host import own_version


def add_fleet_routes(app: FastAPI, service: Service) -> None:
    """The first two have the fields of SGLang's routes of these names that apply here, for routers read those."""

    @app.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        """Open sequences of all models, those without a place in a batch, and the tokens of all, by data-parallel
        rank."""
        cores = service.models.cores
        streams = [stream for core in cores for stream in core.streams.values()]
        tokens = sum(len(stream.request.prompt_token_ids) + stream.output_tokens for stream in streams)
        waiting = sum(core.num_waiting for core in cores)
        return [{"dp_rank": 0, "num_reqs": len(streams), "num_waiting_reqs": waiting, "num_tokens": tokens}]

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Raises Rejection 503 until the model is loaded."""
        ready, config = _ready(service), service.config
        return {
            "version": own_version(),
            "served_model_name": service.name,
            "model_id": service.name,
            "lora_names": list(service.adapters.names),
            "max_model_len": ready.max_model_len,
            "max_running_requests": config.max_num_seqs,
            "block_size": ready.block_size,
            "num_kv_blocks": ready.num_kv_blocks,
            "tp_size": config.tensor_parallel,
            "pp_size": config.pipeline_parallel,
            "dp_size": 1,
            "kv_events": None if service.kv_events is None else service.kv_events.facts,
        }

    if gives(service.config.kv_role):

        @app.get("/query")
        async def query() -> dict[str, Any]:
            """As the bootstrap server of vLLM's MooncakeConnector: by data-parallel rank the engine's id, and by
            tensor-parallel and pipeline rank where decode servers ask. Raises Rejection 503 until the model is loaded.
            """
            address = _ready(service).kv_address
            assert address is not None, "a prefill server has a side channel"
            host = f"[{address.host}]" if ":" in address.host else address.host
            return {"0": {"engine_id": address.model_id, "worker_addr": {"0": {"0": f"tcp://{host}:{address.port}"}}}}


def _ready(service: Service) -> Ready:
    if service.core.ready is None:
        raise Rejection(503, "the engine is loading", code="engine_loading", retry_after_seconds=2)
    return service.core.ready
