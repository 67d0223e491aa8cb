"""The errors of moderation, as clients see them."""

import logging

from sojourn.engine.server.errors import ApiError, Rejection
from sojourn.engine.server.gateway.moderation.verdict import ModerationFailed

log = logging.getLogger(__name__)
# The code of Azure OpenAI's refusal of a prompt. It is also OpenAI's finish reason of a filtered output.
CONTENT_FILTER = "content_filter"
RETRY_SECONDS = 2


def refusal_of(message: str, categories: tuple[str, ...], param: str) -> ApiError:
    """400 for an input that a profile blocks. `param` names the field that has it."""
    return ApiError(400, f"{message} ({', '.join(categories)})", param=param, code=CONTENT_FILTER)


def unavailable(failure: ModerationFailed) -> ApiError:
    """503 where a check that is needed gave no verdict. The reason is in the log, because it names inner addresses."""
    log.warning("a check gave no verdict: %s", failure)
    message = "the content cannot be checked at the moment, and the server answers no unchecked request; try again"
    return Rejection(503, message, code="moderation_unavailable", retry_after_seconds=RETRY_SECONDS)
