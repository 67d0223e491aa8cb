"""Requests that a step finishes by what it sampled for them, or could not sample."""

from collections.abc import Sequence

from engine.request.request import Request
from engine.token.grammar.guides import Guides

OVERFLOWED = -2  # the id of a row with values that are not finite
OVERFLOW = (
    "the model computed values that are no numbers for this request: its weights or its dtype's range are at fault; "
    "with dtype float16, serve it in bfloat16 or float32"
)
NOTHING_LEFT = (
    "the sampling controls of this request leave no token to draw; look at allowed_token_ids, bad_words, min_tokens "
    "and the grammar together"
)


def finishes(
    sampled: dict[str, int], constrained: Sequence[Request], guides: Guides
) -> dict[str, tuple[str, str | None]]:
    """Request id → finish reason, and a sentence for error. Removes from `sampled` the ids that are no tokens."""
    found = {}
    for request_id in [request_id for request_id, token in sampled.items() if token < 0]:
        if sampled.pop(request_id) == OVERFLOWED:
            found[request_id] = ("error", OVERFLOW)
            continue
        # Only the end is left, and the request has no stop token, or may not sample it.
        found[request_id] = ("stop", None) if guides.may_end(request_id) else ("error", NOTHING_LEFT)
    for request in constrained:
        if found.get(request.id) == ("error", OVERFLOW) or not guides.knows(request.id):
            continue
        end = guides.advance(request, sampled.get(request.id))
        if end is not None:
            found[request.id] = end
            if end[0] == "error":
                sampled.pop(request.id, None)
    return found
