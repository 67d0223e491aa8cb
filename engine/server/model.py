"""One served model: its tokenizer and template, its core, its telemetry, and what techniques add to it."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any, get_args

import msgspec

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.server.core.call import Call, Caller
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.core.spare import Spare
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.guests import Adapters, Grammars, Guests, Transfers
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.prompts import ModelLimits, Prompt, PromptEncoder
from sojourn.engine.server.openai.protocol import MAX_SEQUENCES
from sojourn.engine.server.openai.reasoning import TurnPlan, effort_variables, variables_to_set
from sojourn.engine.server.openai.tools import ChatTool, ToolChoice, ToolPlan, plan_tools
from sojourn.engine.server.telemetry.full import Telemetry
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.engine.token.generation_config import sampling_defaults
from sojourn.engine.token.text.reasoning import chosen_format
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer

# From clients: addresses, and the paths of the operator's files.
HIDDEN_SETTINGS = {"host", "port", "otlp_endpoint", "kv_events", "kv_events_replay"} | {
    name for name, field in EngineConfig.model_fields.items() if Path in get_args(field.annotation)
}


class Model:
    """Owns what is of one model. Its core is started by the front, or when a call wants it."""

    def __init__(self, config: EngineConfig, guests: Guests, spare: Spare):
        """Raises ModelError without a tokenizer that can be read, RunDataError without a run directory for writing."""
        folder = model_folder(config.model)
        self.config = config
        self.name = config.served_model_name or folder.name
        self.tokenizer = Tokenizer(folder)
        self.telemetry = Telemetry(config) if config.telemetry == "full" else NoTelemetry(config)
        self.encoder = PromptEncoder(self.tokenizer, ChatTemplate(folder))
        self.reasoning_format = chosen_format(config.reasoning_format, self.encoder.template.reasoning_format)
        self.defaults = sampling_defaults(folder, config.generation_config)
        self.adapters = guests.adapters(config, self.name) if guests.adapters else Adapters()
        self.grammars = guests.grammars(folder) if guests.grammars else Grammars()
        self.transfers = guests.transfers(config) if guests.transfers else Transfers()
        self.core = CoreClient(config, self.telemetry, spare)
        self._created = int(time.time())
        self._num_unseeded = 0
        self._watches: list[asyncio.Task] = []

    def admit(self, num_prompts: int, choices: int) -> None:
        """Raises ApiError unless the core is up and has room for all sequences of a call; 400 where it never will."""
        wanted, limit = num_prompts * choices, min(MAX_SEQUENCES, self.config.max_waiting + self.config.max_num_seqs)
        if wanted > limit:
            message = f"{num_prompts} prompts × {choices} choices are {wanted} sequences, but a call may have {limit}"
            raise invalid("n" if choices > 1 else "prompt", message)
        self.core.admit(wanted)

    def limits(self) -> ModelLimits:
        """Of the loaded model. Raises ApiError 503 before there is one."""
        ready, usual = self.core.require_ready(), self.defaults.max_tokens
        if ready.pool_tokens < ready.max_model_len:
            return ModelLimits(ready.pool_tokens, f"the KV pool holds {ready.pool_tokens} tokens", usual)
        return ModelLimits(ready.max_model_len, f"max_model_len is {ready.max_model_len} tokens", usual)

    async def encode_chat(self, body: ChatRequest, limits: ModelLimits) -> tuple[Prompt, TurnPlan]:
        """The prompt of a checked chat, and how its output is read. Raises ApiError 400."""
        template, reasoning = self.encoder.template, self.reasoning_format
        tools = self.plan_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        variables = effort_variables(body.reasoning_effort, template, reasons=reasoning is not None)
        asked = variables_to_set(body.chat_template_kwargs, template, reasons=reasoning is not None)
        body.chat_template_kwargs = variables | asked
        prompt = await self.encoder.encode_chat(
            body.messages,
            body,
            limits,
            tools=tools and tools.template_value,
            add_special_tokens=body.add_special_tokens,
        )
        if reasoning is None:
            return prompt, TurnPlan(tools)
        continues = body.continue_final_message
        end = body.messages[-1].text if continues else prompt.text
        return prompt, TurnPlan(tools, reasoning.after(end, continues=continues))

    def plan_tools(self, tools: list[ChatTool], choice: ToolChoice | None, *, parallel: bool) -> ToolPlan | None:
        """How prompt and output carry the tools of a body. Raises ApiError 400 where the model's format cannot."""
        return plan_tools(
            tools,
            choice,
            parallel=parallel,
            template=self.encoder.template,
            tool_format=self.config.tool_format,
            added_tokens=self.tokenizer.added_tokens,
        )

    def draw_seed(self) -> int:
        """Of a call that names none: another one each time, and the same ones in each life of a server."""
        self._num_unseeded += 1
        return self.config.seed + self._num_unseeded

    def name_for(self, caller: Caller) -> str:
        """Of the model, or of the adapter that the caller named."""
        return self.name if caller.adapter is None else caller.adapter.name

    def base_fields(self, call: Call, prefix: str) -> dict[str, Any]:
        """The fields that every chunk of a call repeats."""
        return {
            "id": f"{prefix}-{call.caller.request_id}",
            "created": int(time.time()),
            "model": self.name_for(call.caller),
            "system_fingerprint": self._fingerprint(),
        }

    def card(self) -> dict[str, Any]:
        """The model as GET /v1/models shows it, with the settings and facts of its engine once it is loaded."""
        card = {"id": self.name, "object": "model", "created": self._created, "owned_by": "sojourn"}
        ready = self.core.ready
        if ready is None:
            return card
        facts = msgspec.to_builtins(ready)
        for hidden in ("type", "shape", "memory", "startup"):
            facts.pop(hidden, None)
        facts |= {"memory_bytes": ready.memory.parts, "sampling_defaults": self.defaults.shown}
        settings = self.config.model_dump(mode="json", exclude=HIDDEN_SETTINGS)
        return card | {"max_model_len": ready.max_model_len, "engine": settings | facts}

    def watch(self) -> None:
        """Samples and folds from now on, unless it does already."""
        if not self._watches:
            self._watches = [asyncio.create_task(watch) for watch in self.telemetry.watches(self.core.pid)]

    async def stop_watching(self) -> None:
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)  # the last sample of the machine

    def _fingerprint(self) -> str:
        """Changes with the model, its precision and the device: with all that changes the output of a seed."""
        ready = self.core.ready
        facts = (
            self.name, ready.num_parameters, ready.weight_bytes, ready.weights, ready.dtype, ready.device,
            ready.block_size, self.defaults.shown,
        )  # fmt: skip
        return f"fp_{hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest()}"
