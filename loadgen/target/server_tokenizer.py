"""A server's own tokenizer, asked before the run: `target.tokenizer: server`. Nothing has to be installed or found.

POST /tokenize as vLLM and our engine have it: {"model", "prompt", "add_special_tokens"} → {"tokens": [...]}.
"""

import http.client
import json
from dataclasses import dataclass

from loadgen.errors import ScenarioError
from loadgen.target.endpoint import Endpoint, authorisation

SERVER = "server"  # what target.tokenizer says to ask for this one
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """The part of an encoding of `tokenizers` that a server tells."""

    ids: list[int]


class ServerTokenizer:
    """Owns one connection. Asks once for a text; an answer that is none raises ScenarioError with the way out."""

    def __init__(self, endpoint: Endpoint, model: str):
        self._endpoint, self._model = endpoint, model
        kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(endpoint.host, endpoint.port, timeout=TIMEOUT_S)
        self._known: dict[tuple[str, bool], Encoding] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        if (text, add_special_tokens) not in self._known:
            self._known[text, add_special_tokens] = Encoding(self._ask(text, add_special_tokens))
        return self._known[text, add_special_tokens]

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def close(self) -> None:
        self._connection.close()
        self._known.clear()

    def _ask(self, text: str, special: bool) -> list[int]:
        body = json.dumps({"model": self._model, "prompt": text, "add_special_tokens": special}).encode()
        try:
            status, said = self._post(body)
        except (OSError, http.client.HTTPException):  # a server may close a connection that was kept: once more
            self._connection.close()
            try:
                status, said = self._post(body)
            except (OSError, http.client.HTTPException) as error:
                raise self._refusal(str(error) or type(error).__name__) from None
        try:
            tokens = json.loads(said)["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            tokens = None
        if not isinstance(tokens, list):
            raise self._refusal(f"HTTP {status}: {said[:120].decode(errors='replace')!r}")
        return tokens

    def _post(self, body: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **authorisation()}
        self._connection.request("POST", f"{self._endpoint.path}/tokenize", body, headers)
        reply = self._connection.getresponse()
        return reply.status, reply.read()

    def _refusal(self, reason: str) -> ScenarioError:
        return ScenarioError(
            [f"target.tokenizer is {SERVER}, but {self._endpoint.url}/tokenize tells no tokens ({reason}); name a "
             "tokenizer.json instead, or leave target.tokenizer out and prompts are measured in words"]
        )  # fmt: skip
