"""Scheduled request + prompt → the bytes of its HTTP request. All are built before the first one is sent."""

import json
from typing import Any
from urllib.parse import quote

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.prompts.build import Prompt, PromptSource, tokenizer_of
from sojourn.loadgen.prompts.conversation import PiecedBody, TurnParts, Wire
from sojourn.loadgen.scenario.scenario import Scenario, Target
from sojourn.loadgen.scenario.workload import RequestClass
from sojourn.loadgen.schedule.ideal_prefix_hits import tree_path
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.target.endpoint import Endpoint
from sojourn.metrics.run.trace_id import traceparent_of

SAMPLING_FIELDS = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n")
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MOST_OF_A_SESSION = 128  # characters: our server reads no more of a name
_SLOT = "\0 the conversation so far"
_NO_LENGTH = b"Content-Length: 0"


def build_wire_requests(
    scenario: Scenario, seed: int, schedule: list[ScheduledRequest], endpoint: Endpoint, model: str,
    tokenizer: str | None = None, part: list[ScheduledRequest] | None = None,
) -> dict[int, Wire]:  # fmt: skip
    """Bytes by index. Turns of a session become bytes once the answers are known, and long prompts of blocks when they
    are sent: the requests of a session share the text of their blocks.

    `part`: the requests to build, by default all; a request has the same bytes in any part. Raises ScenarioError if the
    tokenizer or the prose cannot be read.
    """
    wanted = {request.index for request in (schedule if part is None else part)}
    in_turns = {klass.klass for klass in scenario.workload.classes if klass.has_turns}
    wire: dict[int, Wire] = {}
    with tokenizer_of(tokenizer or scenario.target.tokenizer, endpoint, model) as encoder:
        writer = PromptWriter(scenario, PromptSource(seed, encoder))
        for request in schedule:
            if request.index not in wanted:
                writer.skip(request)
                continue
            if request.block_ids and request.session_id and not request.prelude:
                pieces, body = writer.pieces(request), json_body(scenario, request, Prompt("", _SLOT), model)
                wire[request.index] = _pieced(endpoint, scenario.target, request, body, pieces)
                continue
            body = json_body(scenario, request, writer.prompt(request), model)
            if request.klass in in_turns and not request.prelude:
                wire[request.index] = _turn_parts(endpoint, scenario.target, request, body)
            else:
                wire[request.index] = http_bytes(endpoint, scenario.target, request, json_bytes(body))
    return wire


def _turn_parts(endpoint: Endpoint, target: Target, request: ScheduledRequest, body: dict[str, Any]) -> TurnParts:
    key = "messages" if target.api == "chat" else "prompt"
    text = body[key] if target.api == "chat" or not request.turn else f" {body[key]}"
    message, slot = json_bytes(text)[1:-1], json_bytes(_SLOT)
    opening, closing = (b"[", b"]") if target.api == "chat" else (b'"', b'"')
    before, after = json_bytes(body | {key: _SLOT}).split(slot)
    # The length is known with the answer: headers are made around that of no body.
    head, headers = http_bytes(endpoint, target, request, b"").split(_NO_LENGTH)
    return TurnParts(target.api, head + _NO_LENGTH[:-1], headers, before + opening, message, closing + after)


def _pieced(
    endpoint: Endpoint, target: Target, request: ScheduledRequest, body: dict[str, Any], pieces: list[bytes]
) -> PiecedBody:
    before, after = json_bytes(body).split(json_bytes(_SLOT)[1:-1])
    head, headers = http_bytes(endpoint, target, request, b"").split(_NO_LENGTH)
    return PiecedBody(head + _NO_LENGTH[:-1], headers, before, pieces, after)


class PromptWriter:
    """Owns the shared prefixes and the blocks of sessions, each written once."""

    def __init__(self, scenario: Scenario, source: PromptSource):
        self._classes = {klass.klass: klass for klass in scenario.workload.classes}
        self._source = source
        self._prefixes: dict[tuple, str] = {}
        self._blocks: dict[tuple[int, int], bytes] = {}

    def pieces(self, request: ScheduledRequest) -> list[bytes]:
        """The prompt of a request of blocks, as JSON, in pieces between which a space stands."""
        size, left, words = request.block_tokens, request.prompt_tokens, self._source.by_name.words
        found = []
        for block in request.block_ids:
            part = min(size, left)
            if (block, part) not in self._blocks:
                self._blocks[block, part] = json_bytes(" ".join(words(("block", block), part, size)))[1:-1]
            found.append(self._blocks[block, part])
            left -= part
        if left > 0:
            found.append(json_bytes(" ".join(words(("own", request.index), left)))[1:-1])
        return found

    def prompt(self, request: ScheduledRequest) -> Prompt | list[dict[str, Any]]:
        """The prompt of a request; recorded messages as they are. Call once for each request, in order of the
        schedule."""
        if request.content:
            text = json.loads(request.content)
            return Prompt("", text) if isinstance(text, str) else text
        if request.block_ids:
            blocks = (request.block_ids, request.block_tokens, request.prompt_tokens, request.index)
            return Prompt("", self._source.by_name.blocks(*blocks))
        klass = self._classes[request.klass]
        if request.turn:  # the conversation so far stands before it
            prefix, size, shared = "", request.message_tokens, 0
        else:
            prefix, size, shared = self._prefix(request), request.prompt_tokens, prefix_tokens(request)
        if klass.content == "random":
            prompt = Prompt(prefix, " ".join(self._source.by_name.words(("random", request.index), size - shared)))
        else:
            prompt = self._source.prompt(size, prefix, shared)
        return prompt if klass.shared_part == "first" else Prompt(prompt.body, prompt.prefix)

    def skip(self, request: ScheduledRequest) -> None:
        """Replaces `prompt` for a request of another process, so that later prompts use the same prose."""
        if not request.content and not request.block_ids and self._classes[request.klass].content != "random":
            self._source.skip()

    def _prefix(self, request: ScheduledRequest) -> str:
        if request.shared_prefix < 0:
            return ""
        klass = self._classes[request.klass]
        if klass.prefix_tree is None:
            return self._written((request.klass, request.shared_prefix), request.shared_prefix_tokens, "")
        text = ""
        for level, node in tree_path(klass.prefix_tree, request):
            added = self._written((request.klass, level, node), klass.prefix_tree.node_tokens, text)
            text = f"{text} {added}" if text else added
        return text

    def _written(self, name: tuple, num_tokens: int, behind: str) -> str:
        if name not in self._prefixes:
            if self._classes[name[0]].content == "random":
                written = " ".join(self._source.by_name.words(("prefix", *name), num_tokens))
            else:
                written = self._source.shared_prefix(" ".join(map(str, name)), num_tokens, behind)
            self._prefixes[name] = written
        return self._prefixes[name]


def prefix_tokens(request: ScheduledRequest) -> int:
    return request.shared_prefix_tokens if request.shared_prefix >= 0 else 0


def json_body(
    scenario: Scenario, request: ScheduledRequest, prompt: Prompt | list[dict[str, Any]], model: str
) -> dict[str, Any]:
    """The request's JSON body. Defaults of a scenario are left out: not every server knows them."""
    target = scenario.target
    body: dict[str, Any] = {
        "model": model,
        target.max_tokens_key: request.max_tokens,
        "temperature": request.temperature,
    }
    if isinstance(prompt, list):
        if target.api != "chat":
            raise ScenarioError(
                f"class {request.klass} sends recorded messages, but target.api is {target.api}; set it to chat"
            )
        body["messages"] = prompt
    elif target.api == "chat":
        system = [{"role": "system", "content": prompt.prefix}] if prompt.prefix else []
        body["messages"] = [*system, {"role": "user", "content": prompt.body}]
    else:
        body["prompt"] = prompt.text
    klass = _class_of(scenario, request)
    if klass.send_seed and request.temperature > 0:
        body["seed"] = request.seed
    body |= {name: value for name in ("top_k", "top_p") if (value := getattr(request, name)) is not None}
    body |= _sampling(scenario, request)
    if "max_completion_tokens" in body:  # the newer name of OpenAI's API; servers that want it refuse both together
        body.pop("max_tokens", None)
    if (named := klass.adapter or klass.model) is not None:
        body["model"] = named
    if request.ignore_eos:
        body["ignore_eos"] = True
    if request.priority:
        body["priority"] = request.priority
    return body | stream_fields(target)


def stream_fields(target: Target) -> dict[str, Any]:
    """The fields of a body that ask for a stream and its token counts."""
    if not target.stream:
        return {}
    if target.usage == "none":
        return {"stream": True}
    continuous = {"continuous_usage_stats": True} if target.usage == "continuous" else {}
    return {"stream": True, "stream_options": {"include_usage": True} | continuous}


def _class_of(scenario: Scenario, request: ScheduledRequest) -> RequestClass:
    return next(each for each in scenario.workload.classes if each.klass == request.klass)


def _sampling(scenario: Scenario, request: ScheduledRequest) -> dict[str, Any]:
    """Sampling and response format of the class, overridden by those of the request's variant."""
    klass = _class_of(scenario, request)
    layers = [klass, *([klass.variants[request.variant]] if request.variant >= 0 else [])]
    fields: dict[str, Any] = {}
    for layer in layers:
        fields |= {name: value for name in SAMPLING_FIELDS if (value := getattr(layer, name)) is not None}
        if layer.response_format is not None or layer.regex is not None:  # an answer has one form
            fields.pop("response_format", None), fields.pop("structured_outputs", None)
        if layer.response_format is not None:
            fields["response_format"] = layer.response_format
        if layer.regex is not None:
            fields["structured_outputs"] = {"regex": layer.regex}
        fields |= layer.extra_body
    return fields


def http_bytes(endpoint: Endpoint, target: Target, request: ScheduledRequest, content: bytes) -> bytes:
    """One HTTP/1.1 request, on a connection of its own unless the target reuses them."""
    headers = {
        "Host": endpoint.authority,
        "Connection": "close" if target.connections == "per_request" else "keep-alive",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Accept": "text/event-stream" if target.stream else "application/json",
        "User-Agent": "sojourn",
        "x-request-id": request.request_id,
        **({"traceparent": traceparent_of(request.request_id)} if target.traceparent else {}),
        # By it a router keeps the turns of a conversation together. A trace may name it with any characters.
        **({"x-session-id": quote(request.session_id)[:MOST_OF_A_SESSION]} if request.session_id else {}),
        **({"x-sojourn-class": request.klass} if request.klass else {}),
        **({"x-sojourn-tenant": request.tenant} if request.tenant else {}),
        **endpoint.own_headers(),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {endpoint.path}{_PATHS[target.api]} HTTP/1.1\r\n{lines}\r\n".encode() + content


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
