"""What speculation by prompt lookup would have spared: measured on a sample of requests, whether it is on or not."""

from engine.request.request import Request
from engine.token.speculation.ngram_index import lookup_steps

# One request in so many, and its first tokens: up to 4 µs a token of host time, behind the tokens that users wait for.
EACH = 16
MOST_TOKENS = 1024


class LookupSample:
    """Counts the requests that end, and measures each `EACH`th."""

    def __init__(self) -> None:
        self._ended = 0

    def measure(self, request: Request) -> None:
        """Sets `lookup_steps` of a request that has ended, if it is in the sample and not too long."""
        self._ended += 1
        if self._ended % EACH == 1 and request.output_tokens and len(request.token_ids) <= MOST_TOKENS:
            request.lookup_steps = lookup_steps(request.token_ids, request.prompt_tokens)
