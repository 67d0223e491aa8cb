"""A moderation endpoint behind HTTP, in the shape of OpenAI's POST /v1/moderations."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from sojourn.engine.server.gateway.moderation.verdict import Kind, ModerationFailed, Verdict

FIRST_PAUSE_SECONDS = 0.05  # before the first retry; twice as long before each further one
RETRIED = frozenset({408, 429, 500, 502, 503, 504})


class HttpModerator:
    """Sends texts to an endpoint, over connections that stay open.

    A long text is sent in parts, in one request. Its verdict is that of all parts together.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        categories: Sequence[str],
        model: str | None = None,
        key: str | None = None,
        timeout_seconds: float = 2.0,
        retries: int = 1,
        max_connections: int = 32,
        max_part_characters: int = 20_000,
        thresholds: Mapping[str, float] | None = None,
        allows_on_failure: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ):
        """`timeout_seconds` is for a check with all its retries. A category with a threshold is flagged by its score,
        another one as the endpoint says. Flags outside `categories` count as the last of them."""
        self.name = name
        self.categories = tuple(categories)
        self.allows_on_failure = allows_on_failure
        self._url = url
        self._fields = {} if model is None else {"model": model}
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._part_characters = max_part_characters
        self._thresholds = thresholds or {}
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_seconds,
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            transport=transport,
            trust_env=False,
        )

    async def check(self, text: str, kind: Kind) -> Verdict:
        size = self._part_characters
        parts = [text[begin : begin + size] for begin in range(0, len(text), size)] or [""]
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._ask({"input": parts if len(parts) > 1 else text} | self._fields)
        except TimeoutError:
            raise ModerationFailed(f"{self.name}: no answer of {self._url} in {self._timeout_seconds} s") from None
        return self._verdict(answer, len(parts))

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, body: dict[str, Any]) -> Any:
        pause_seconds = FIRST_PAUSE_SECONDS
        for tries_left in range(self._retries, -1, -1):
            try:
                response = await self._client.post(self._url, json=body)
                if response.status_code == 200:
                    return response.json()
                problem = f"status {response.status_code}"
                if response.status_code not in RETRIED:
                    break
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            except ValueError:
                problem = "an answer that is not JSON"
                break
            if tries_left:
                await asyncio.sleep(pause_seconds)
                pause_seconds *= 2
        raise ModerationFailed(f"{self.name}: {self._url} gave {problem}")

    def _verdict(self, answer: Any, num_parts: int) -> Verdict:
        flagged: set[str] = set()
        scores: dict[str, float] = {}
        try:
            results = answer["results"]
            if len(results) != num_parts:
                raise ValueError
            for result in results:
                for name, score in result["category_scores"].items():
                    category = self._category(name)
                    scores[category] = max(float(score), scores.get(category, 0.0))
                    if score >= self._thresholds.get(name, float("inf")):
                        flagged.add(category)
                without_threshold = (name for name in result["categories"] if name not in self._thresholds)
                flagged |= {self._category(name) for name in without_threshold if result["categories"][name]}
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ModerationFailed(f"{self.name}: the answer of {self._url} has not OpenAI's shape") from None
        return Verdict(frozenset(flagged), scores)

    def _category(self, name: str) -> str:
        """The category as the file names it: what an endpoint invents does not become a label of a metric."""
        return name if name in self.categories else self.categories[-1]
