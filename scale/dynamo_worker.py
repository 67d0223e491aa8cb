"""A worker of NVIDIA Dynamo in front of one `sojourn serve`: tokens in, tokens out.

It runs in Dynamo's environment, and imports nothing of Sojourn (docs/fleet.md has the packages). Dynamo's frontend
renders chat templates, tokenises, chooses a worker, finds stop strings and writes text. The server gets token ids
at /v1/completions, and gives token ids back.

    python scale/dynamo_worker.py --server http://127.0.0.1:8001 --model FOLDER

Dynamo's own environment variables (DYN_DISCOVERY_BACKEND, DYN_NAMESPACE and others) say where it registers. The worker
leaves the registry while the server is not ready, and ends when the server is gone. SIGTERM takes it out of the
registry first; open streams go on.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import CannotConnect, Disconnected, HttpError, InvalidArgument, Unknown

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5  # for the server to say whether it is ready, and how much it has to do
LOST_POLLS = 2  # without an answer, after which the server counts as gone
LOST_CODES = ("engine_core_died", "engine_draining")  # of an error event: another server can go on
KV_USAGE = re.compile(rb"^sojourn_memory_kv_usage_ratio\{[^}]*\} (\S+)$", re.MULTILINE)
OPTIONS = ("sampling_options", "stop_conditions", "output_options")
# Dynamo's sampling options that /v1/completions has under the same name.
SAMPLING = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "logit_bias",
)  # fmt: skip
GUIDED = ("json", "regex", "choice", "grammar")
# Values of other options that ask for nothing. `stop` is Dynamo's own work, with the text that it makes.
# After the first chunk with a reason to end, Dynamo reads no further one, so that there is one choice.
PASSING: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
}  # fmt: skip


def body_of(request: dict[str, Any], model: str, context_length: int) -> dict[str, Any]:
    """Dynamo's request as a body of POST /v1/completions. Raises InvalidArgument for what it cannot say."""
    sampling, stops, outputs = (request.get(name) or {} for name in OPTIONS)
    refuse(request, sampling, stops, outputs)
    prompt, guided = request["token_ids"], guided_of(sampling)
    ending = list(stops.get("stop_token_ids") or [])
    if not guided and not stops.get("ignore_eos"):  # a grammar says where the output ends
        ending += stops.get("stop_token_ids_hidden") or []
    body = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": stops.get("max_tokens") or max(context_length - len(prompt), 1),
        "min_tokens": stops.get("min_tokens"),
        "ignore_eos": stops.get("ignore_eos"),
        "logprobs": outputs.get("logprobs"),
        **{name: sampling.get(name) for name in SAMPLING},
        "structured_outputs": guided or None,
        "stop_token_ids": ending or None,
    }
    return {name: value for name, value in body.items() if value is not None}


def refuse(request: dict[str, Any], sampling: dict[str, Any], stops: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Raises InvalidArgument for an option that no body of the server has."""
    for name, value in sampling.items():
        known = name in SAMPLING or name == "guided_decoding"
        if value is not None and not known and value not in PASSING.get(name, ()):
            raise InvalidArgument(f"{name}={value!r} is not passed on to a Sojourn server; leave it out")
    if stops.get("max_thinking_tokens") is not None:
        raise InvalidArgument("a limit of thinking tokens is not passed on to a Sojourn server; leave it out")
    for name in ("multi_modal_data", "prefill_result", "encoder_result"):
        if request.get(name):
            raise InvalidArgument(f"a Sojourn worker takes no {name}: it serves texts, and whole requests")
    if outputs.get("logprobs") or outputs.get("prompt_logprobs"):
        raise InvalidArgument(
            "alternatives of log-probabilities, and those of prompts, are not passed on: ask a Sojourn server directly"
        )


def guided_of(sampling: dict[str, Any]) -> dict[str, Any]:
    """What guides the decoding; {} for nothing. Raises InvalidArgument for a guide that the server does not have."""
    guided = {name: value for name, value in (sampling.get("guided_decoding") or {}).items() if value is not None}
    if unknown := sorted(set(guided) - set(GUIDED)):
        raise InvalidArgument(f"guided decoding by {', '.join(unknown)} is not passed on to a Sojourn server")
    return guided


def refusal(status: int, text: str) -> Exception:
    """The exception that tells Dynamo's frontend why the server refused. For CannotConnect it asks another worker."""
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:200]
    if status == 503:
        return CannotConnect(text)
    if status == 429:
        return HttpError(429, text)
    return InvalidArgument(text) if 400 <= status < 500 else Unknown(text)


class SojournEngine(LLMEngine):
    """One `sojourn serve`, as Dynamo sees an engine."""

    def __init__(self, server: str, model: Path):
        self.server = server.rstrip("/")
        self.model = model
        self.facts: dict[str, Any] = {}  # of GET /server_info
        self.session: aiohttp.ClientSession | None = None
        self.open: dict[str, aiohttp.ClientResponse] = {}  # by Dynamo's id of the request
        self.watching: list[asyncio.Task] = []
        self.endpoint: Any = None
        self.snapshots: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["SojournEngine", WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--server", required=True, help="address of the server, such as http://127.0.0.1:8001")
        parser.add_argument(
            "--model", required=True, type=Path, help="folder of its checkpoint: tokenizer and template"
        )
        parser.add_argument("--tool-call-parser", help="Dynamo's parser of tool calls; by default none")
        parser.add_argument("--reasoning-parser", help="Dynamo's parser of reasoning; by default none")
        given = parser.parse_args(argv)
        for name in ("config.json", "tokenizer.json"):
            if not (given.model / name).is_file():
                parser.error(f"--model {given.model} has no {name}; Dynamo's frontend needs it")
        engine = cls(given.server, given.model)
        await engine.connect()
        return engine, WorkerConfig(
            namespace=os.environ.get("DYN_NAMESPACE", "dynamo"),
            component="sojourn",
            model_name=str(given.model),
            served_model_name=engine.facts["served_model_name"],
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE", "tcp"),
            event_plane=os.environ.get("DYN_EVENT_PLANE"),
            tool_call_parser=given.tool_call_parser,
            reasoning_parser=given.reasoning_parser,
            enable_kv_routing=engine.facts["kv_events"] is not None,
        )

    async def connect(self) -> None:
        """Reads what the server is. Raises CannotConnect."""
        key = os.environ.get("SOJOURN_API_KEY")
        self.session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, connect=5),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=1 << 20,
        )
        try:
            async with self.session.get(f"{self.server}/server_info") as answer:
                if answer.status != 200:
                    raise CannotConnect(f"{self.server} is not ready: {(await answer.text())[:200]}")
                self.facts = await answer.json()
        except aiohttp.ClientError as error:
            raise CannotConnect(f"no server answers at {self.server}: {error}") from None

    async def start(self, worker_id: int) -> EngineConfig:
        self.watching = [asyncio.create_task(self.watch()), asyncio.create_task(self.report_loads())]
        return EngineConfig(
            model=str(self.model),
            served_model_name=self.facts["served_model_name"],
            llm=LlmRegistration(
                context_length=self.facts["max_model_len"],
                kv_cache_block_size=self.facts["block_size"],
                total_kv_blocks=self.facts["num_kv_blocks"],
                max_num_seqs=self.facts["max_running_requests"],
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        events = self.facts["kv_events"]
        return [] if events is None else [ZmqSource(events["endpoint"], events["topic"])]

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        normalize_request_token_ids(request)
        model = request.get("model")
        named = model if model in self.facts["lora_names"] else self.facts["served_model_name"]
        body, name = body_of(request, named, self.facts["max_model_len"]), context.id()
        session_id = (request.get("agent_context") or {}).get("session_id")
        headers = {"X-Request-ID": name} | ({"X-Session-ID": session_id} if session_id else {})
        last, usage = None, None  # the last chunk waits for the usage
        try:
            async with self.session.post(f"{self.server}/v1/completions", json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise refusal(answer.status, await answer.text())
                self.open[name] = answer
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        break
                    event = json.loads(line[6:])
                    if "error" in event:
                        is_lost = event["error"]["code"] in LOST_CODES
                        raise (Disconnected if is_lost else Unknown)(event["error"]["message"])
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        chunk = chunk_of(choice)
                        if "finish_reason" in chunk:
                            last = chunk
                        else:
                            yield chunk
                else:
                    if not context.is_stopped():
                        raise Disconnected(f"the stream of {self.server} ended early")
            if last is not None:
                yield last | {"completion_usage": usage}
        except aiohttp.ClientConnectorError as error:
            raise CannotConnect(f"no server answers at {self.server}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            if context.is_stopped():
                return
            raise Disconnected(f"{self.server} ended the connection: {error}") from None
        finally:
            self.open.pop(name, None)

    async def abort(self, context: Any) -> None:
        """Closes the connection; the server then frees the request's blocks within a step."""
        if (answer := self.open.get(context.id())) is not None:
            answer.close()

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self.endpoint = endpoint

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self.snapshots = publisher

    async def watch(self) -> None:
        """Keeps the registry up to date: out while the server is not ready, and the end when it is gone."""
        is_in, lost = True, 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                async with self.session.get(f"{self.server}/ready", timeout=in_time()) as answer:
                    is_ready, lost = answer.status == 200, 0
            except TimeoutError:
                is_ready = False
            except (aiohttp.ClientError, OSError) as error:
                is_ready, lost = False, lost + 1
                if lost == LOST_POLLS:
                    print(f"the server {self.server} is gone ({error}); this worker ends", file=sys.stderr, flush=True)
                    os.kill(os.getpid(), signal.SIGTERM)
            if self.endpoint is not None and is_ready != is_in:
                is_in = await self.change_registry(is_ready)

    async def change_registry(self, is_ready: bool) -> bool:
        """Registers or leaves. Whether the worker is in the registry then: a change that failed is tried again."""
        change = self.endpoint.register_endpoint_instance if is_ready else self.endpoint.unregister_endpoint_instance
        try:
            await change()
        except Exception as error:  # of the registry, whatever it is: the watch has to go on
            what = "entered" if is_ready else "left"
            print(f"the registry could not be {what} ({error}); it is tried again", file=sys.stderr, flush=True)
            return not is_ready
        return is_ready

    async def report_loads(self) -> None:
        """Beside `watch`: a page of metrics that is late or missing does not say that the server is not ready."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                await self.report_load()

    async def report_load(self) -> None:
        """Tells the router how many KV blocks are in use, where the server has metrics."""
        async with self.session.get(f"{self.server}/metrics", timeout=in_time()) as answer:
            found = KV_USAGE.search(await answer.read()) if answer.status == 200 else None
        if found is not None and self.snapshots is not None:
            ratio, total = float(found[1]), self.facts["num_kv_blocks"]
            self.snapshots.publish(0, ComponentSnapshot(round(ratio * total), total, ratio, 0))

    async def cleanup(self) -> None:
        for task in self.watching:
            task.cancel()
        await asyncio.gather(*self.watching, return_exceptions=True)
        self.watching = []
        if self.session is not None:
            await self.session.close()
            self.session = None


def in_time() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=ANSWER_SECONDS)


def chunk_of(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a chunk of /v1/completions as Dynamo has it."""
    chunk = {"index": choice["index"], "token_ids": choice.get("token_ids") or []}
    if choice.get("logprobs"):
        chunk["log_probs"] = choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] is not None:
        chunk["finish_reason"] = choice["finish_reason"]
    return chunk


if __name__ == "__main__":
    run(SojournEngine)
