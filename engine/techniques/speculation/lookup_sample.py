"""What speculation by prompt lookup would have spared: measured on a sample of requests, whether it is on or not."""

from typing import Any

from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques.speculation.proposers.ngram_index import lookup_steps

# A token costs up to 4 µs of host time, behind the tokens that users wait for. So many a second are 0.5% of the time.
TOKENS_PER_SECOND = 1250
MOST_TOKENS = 2048  # of one request, and saved up while nothing ends


class LookupSample(Technique):
    """Measures as many of the requests that end as its share of the time allows."""

    name = "speculation"

    def __init__(self) -> None:
        self._tokens = float(MOST_TOKENS)
        self._now_ns = 0

    def measure(self, request: Request, now_ns: int) -> None:
        """Sets the part `lookup` of a request that has ended, if there is time for it."""
        earned = TOKENS_PER_SECOND * (now_ns - self._now_ns) / 1e9 if self._now_ns else 0.0
        self._tokens, self._now_ns = min(MOST_TOKENS, self._tokens + earned), now_ns
        length = len(request.token_ids)
        if request.output_tokens and length <= self._tokens:
            self._tokens -= length
            request.parts["lookup"] = lookup_steps(request.token_ids, request.prompt_tokens)

    def report(self, request: Request) -> dict[str, Any]:
        return {"lookup_steps": request.parts.get("lookup")}
