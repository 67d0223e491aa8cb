"""The part of the official OpenAI specification that this server offers, for machines that send what it allows.

Types and names come from `openai.types`, the client's own picture of the specification; the bounds, which it does not
have, stand here as the API reference states them. What is cut off, and why:

- `stream`: a stream is no JSON document; test_conformance.py re-validates its chunks one by one.
- parts of messages that are not text: refused by name. `tools`, roles for tools and `response_format`: they have tests
  of their own, which also look at what comes out.
- `store`, `metadata`, `audio`, `moderation`, `web_search_options` and others that are refused by name, unless they ask
  for nothing (engine/server/openai/protocol.py); of the enumerations among them, the values that are refused.
- large counts: n, best_of and max_tokens are legal beyond what is sent here, but take time. `max_completion_tokens` is
  made a required field for the same reason.
"""

from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from pydantic import TypeAdapter

CHAT_FIELDS = (
    "model", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "seed", "stop", "temperature", "top_p", "user", "parallel_tool_calls",
    "reasoning_effort", "verbosity", "prompt_cache_key", "safety_identifier", "service_tier",
)  # fmt: skip
COMPLETION_FIELDS = (
    "model", "prompt", "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n",
    "presence_penalty", "seed", "stop", "suffix", "temperature", "top_p", "user",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "model": {"const": "tiny-model"},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[1-9][0-9]{0,2}$"},  # ids that the model has
        "additionalProperties": {"type": "integer", "minimum": -100, "maximum": 100},
        "maxProperties": 5,
    },
    "reasoning_effort": {"enum": ["none", None]},
    "service_tier": {"enum": ["auto", "default", None]},
    "stop": {
        "anyOf": [
            {"type": ["string", "null"], "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
        ]
    },
    "suffix": {"enum": ["", None]},
    "verbosity": {"enum": ["medium", None]},
}
BOUNDS: dict[str, dict[str, Any]] = {
    "best_of": {"minimum": 4, "maximum": 6},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "logprobs": {"minimum": 0, "maximum": 5},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "max_tokens": {"minimum": 1, "maximum": 6},
    "max_completion_tokens": {"minimum": 1, "maximum": 6},
    "n": {"minimum": 1, "maximum": 4},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
}
TEXT_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "additionalProperties": False,
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "additionalProperties": False,
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "name": {"type": "string"},
    },
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def specification() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {"Error": ERROR}
    chat = _request(ChatParams, CHAT_FIELDS, schemas, required=["model", "messages", "max_completion_tokens"])
    chat["properties"]["messages"] = {"type": "array", "minItems": 1, "maxItems": 4, "items": TEXT_MESSAGE}
    chat["properties"]["logprobs"] = {"type": ["boolean", "null"]}
    completion = _request(CompletionParams, COMPLETION_FIELDS, schemas, required=["model", "prompt"])
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2559}}
    lists = [{"type": "array", "minItems": 1, "maxItems": 4, "items": item} for item in (text, ids)]
    completion["properties"]["prompt"] = {"anyOf": [text, ids, *lists]}
    answer = _schema(TypeAdapter(Completion), schemas)
    # The first token of an echoed prompt has no log-probability: the API answers null there, whatever the types say.
    for name in ("token_logprobs", "top_logprobs"):
        listed = next(form for form in schemas["Logprobs"]["properties"][name]["anyOf"] if form["type"] == "array")
        listed["items"] = {"anyOf": [listed["items"], {"type": "null"}]}
    models = {"type": "object", "required": ["object", "data"], "properties": {"data": {"type": "array"}}}
    models["properties"]["data"]["items"] = _schema(TypeAdapter(Model), schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI API, as far as this server offers it", "version": "2.3.0"},
        "paths": {
            "/v1/completions": {"post": _operation(completion, answer)},
            "/v1/chat/completions": {"post": _operation(chat, _schema(TypeAdapter(ChatCompletion), schemas))},
            "/v1/models": {"get": _operation(None, models)},
            "/v1/models/{model}": {
                "get": _operation(None, _schema(TypeAdapter(Model), schemas))
                | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
            },
        },
        "components": {"schemas": schemas},
    }


def _schema(adapter: TypeAdapter, schemas: dict[str, Any]) -> dict[str, Any]:
    """The type's own schema; those that it names go to `schemas`."""
    schema = adapter.json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    return schema


def _request(params: Any, names: tuple[str, ...], schemas: dict[str, Any], required: list[str]) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    whole = _schema(TypeAdapter(params), wanted)
    official = {name: whole["properties"][name] for name in names}  # all of them are there
    properties = {name: OWN.get(name) or _bounded(schema, BOUNDS.get(name, {})) for name, schema in official.items()}
    schemas |= wanted
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def _bounded(schema: dict[str, Any], bounds: dict[str, Any]) -> dict[str, Any]:
    """Bounds stand at the numeric one of several types."""
    if "anyOf" in schema:
        return schema | {"anyOf": [_bounded(member, bounds) for member in schema["anyOf"]]}
    return schema | bounds if schema.get("type") in ("integer", "number") else schema


def _operation(body: dict[str, Any] | None, answer: dict[str, Any]) -> dict[str, Any]:
    def response(schema: dict[str, Any]) -> dict[str, Any]:
        return {"description": "", "content": {"application/json": {"schema": schema}}}

    refused = response({"$ref": "#/components/schemas/Error"})
    operation: dict[str, Any] = {
        "responses": {"200": response(answer), "400": refused, "404": refused, "405": refused, "415": refused}
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
