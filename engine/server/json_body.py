"""The JSON of a request's body."""

from typing import Any

import msgspec

from engine.server.errors import ApiError


def decode(content: bytes) -> Any:
    """Strict JSON: no NaN, no half characters, no number that a double or 64 bits cannot hold; of two keys that are
    alike the last counts. Raises ApiError 400."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
