"""GET /get_load and /server_info: how busy a server is, and what it is, for the router in front of it."""

from typing import Any

from fastapi import FastAPI

from sojourn.engine.server.front import Front
from sojourn.metrics.version import own_version


def add_fleet_routes(app: FastAPI, front: Front) -> None:
    """They have the fields of SGLang's routes of these names that apply here, for routers read those."""

    @app.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        """Open sequences of all models, those without a place in a batch, and the tokens of all, by data-parallel
        rank."""
        cores = front.models.cores
        streams = [stream for core in cores for stream in core.streams.values()]
        tokens = sum(len(stream.request.prompt_token_ids) + stream.output_tokens for stream in streams)
        waiting = sum(core.num_waiting for core in cores)
        return [{"dp_rank": 0, "num_reqs": len(streams), "num_waiting_reqs": waiting, "num_tokens": tokens}]

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Raises Rejection 503 until the model is loaded."""
        model, config = front.first, front.config
        ready = model.core.require_ready()
        return {
            "version": own_version(),
            "served_model_name": model.name,
            "model_id": model.name,
            "lora_names": list(model.adapters.names),
            "max_model_len": ready.max_model_len,
            "max_running_requests": config.max_num_seqs,
            "block_size": ready.block_size,
            "num_kv_blocks": ready.num_kv_blocks,
            "tp_size": config.tensor_parallel,
            "pp_size": config.pipeline_parallel,
            "dp_size": 1,
            "kv_events": None if front.kv_events is None else front.kv_events.facts,
        }
