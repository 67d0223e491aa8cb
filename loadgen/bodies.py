"""Scheduled request + prompt → the bytes that go on the wire. All are made before the first one is sent."""

import json
from typing import Any

from loadgen.endpoint import Endpoint, authorisation
from loadgen.prompts import Prompt, PromptSource, load_tokenizer
from loadgen.scenario import Scenario, Target
from loadgen.schedule import ScheduledRequest

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def build_wire_requests(
    scenario: Scenario, seed: int, schedule: list[ScheduledRequest], endpoint: Endpoint, model: str,
    tokenizer: str | None = None,
) -> list[bytes]:  # fmt: skip
    """Bytes by index. Raises ScenarioError where the tokenizer or the prose cannot be read."""
    named = tokenizer or scenario.target.tokenizer
    source = PromptSource(seed, load_tokenizer(named) if named else None)
    prefixes: dict[tuple[str, int], str] = {}
    wire = []
    for request in schedule:
        key = (request.klass, request.shared_prefix)
        if request.shared_prefix >= 0 and key not in prefixes:
            prefixes[key] = source.shared_prefix(
                f"{request.klass} {request.shared_prefix}", request.shared_prefix_tokens
            )
        prompt = source.prompt(request.prompt_tokens, prefixes.get(key, ""), request.shared_prefix_tokens)
        wire.append(http_bytes(endpoint, scenario.target, request, json_body(scenario.target, request, prompt, model)))
    return wire


def json_body(target: Target, request: ScheduledRequest, prompt: Prompt, model: str) -> dict[str, Any]:
    """The request in OpenAI's words. Defaults of a scenario are left out: not every server knows them."""
    body: dict[str, Any] = {"model": model, "max_tokens": request.max_tokens, "temperature": request.temperature}
    if target.api == "chat":
        system = [{"role": "system", "content": prompt.prefix}] if prompt.prefix else []
        body["messages"] = [*system, {"role": "user", "content": prompt.body}]
    else:
        body["prompt"] = prompt.text
    if request.temperature > 0:
        body["seed"] = request.seed
    if request.top_k is not None:
        body["top_k"] = request.top_k
    if request.top_p is not None:
        body["top_p"] = request.top_p
    if request.ignore_eos:
        body["ignore_eos"] = True
    if request.priority:
        body["priority"] = request.priority
    if target.stream:
        body["stream"] = True
        if target.usage != "none":
            body["stream_options"] = {"include_usage": True}
            if target.usage == "continuous":
                body["stream_options"]["continuous_usage_stats"] = True
    return body


def http_bytes(endpoint: Endpoint, target: Target, request: ScheduledRequest, body: dict[str, Any]) -> bytes:
    """One HTTP/1.1 request on a connection of its own."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    headers = {
        "Host": endpoint.authority,
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Accept": "text/event-stream" if target.stream else "application/json",
        "User-Agent": "sojourn",
        "x-request-id": request.request_id,
        **({"x-sojourn-class": request.klass} if request.klass else {}),
        **({"x-sojourn-tenant": request.tenant} if request.tenant else {}),
        **authorisation(),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {endpoint.path}{_PATHS[target.api]} HTTP/1.1\r\n{lines}\r\n".encode() + content
