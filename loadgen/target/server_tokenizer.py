"""A server's own tokenizer, queried before the run: `target.tokenizer: server`. Nothing has to be installed.

POST /tokenize as in vLLM and our engine: {"model", "prompt", "add_special_tokens"} → {"tokens": [...]}.
"""

import http.client
import json
from dataclasses import dataclass

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.target.endpoint import Endpoint

SERVER = "server"  # the value of target.tokenizer
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """The part of an encoding of `tokenizers` that a server returns."""

    ids: list[int]


class ServerTokenizer:
    """Owns one connection. Sends each text once; an invalid reply raises ScenarioError with the way out."""

    def __init__(self, endpoint: Endpoint, model: str):
        self._endpoint, self._model = endpoint, model
        self._connection = endpoint.connection(TIMEOUT_S)
        self._known: dict[tuple[str, bool], Encoding] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        if (text, add_special_tokens) not in self._known:
            self._known[text, add_special_tokens] = Encoding(self._post(text, add_special_tokens))
        return self._known[text, add_special_tokens]

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def close(self) -> None:
        self._connection.close()
        self._known.clear()

    def _post(self, text: str, special: bool) -> list[int]:
        body = json.dumps({"model": self._model, "prompt": text, "add_special_tokens": special}).encode()
        headers = {"Content-Type": "application/json", **self._endpoint.own_headers()}
        for attempt in (1, 2):  # a server may close an idle connection
            try:
                self._connection.request("POST", f"{self._endpoint.path}/tokenize", body, headers)
                response = self._connection.getresponse()
                status, reply = response.status, response.read()
                break
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if attempt == 2:
                    raise self._refusal(str(error) or type(error).__name__) from None
        try:
            tokens = json.loads(reply)["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            tokens = None
        if not isinstance(tokens, list):
            raise self._refusal(f"HTTP {status}: {reply[:120].decode(errors='replace')!r}")
        return tokens

    def _refusal(self, reason: str) -> ScenarioError:
        return ScenarioError(
            f"target.tokenizer is {SERVER}, but {self._endpoint.url}/tokenize tells no tokens ({reason}); name a "
            "tokenizer.json instead, or leave target.tokenizer out and prompts are measured in words"
        )
