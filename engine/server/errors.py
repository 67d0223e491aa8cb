"""Errors as the OpenAI API shows them: {"error": {message, type, param, code}}; all four are always present.

Paths of Anthropic's API show them in its own shape: {"type": "error", "error": {type, message}}.
"""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from sojourn.metrics.errors import SojournError
from sojourn.metrics.records import RequestRecord

ANTHROPIC_PATH = "/v1/messages"


class ApiError(SojournError):
    """A request that is refused, or that failed, with a sentence for its sender."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds
        self.record: RequestRecord | None = None  # of a call that was refused before the core got it

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        """In the shape of the API that the path belongs to. Has the headers by which the official clients decide
        whether and when they try again."""
        headers = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
            headers["Retry-After-Ms"] = str(self.retry_after_seconds * 1000)
        elif self.status >= 500:  # the same request would fail again
            headers["X-Should-Retry"] = "false"
        body = self.anthropic_body() if path.startswith(ANTHROPIC_PATH) else self.body()
        return JSONResponse(body, self.status, headers)


class Rejection(ApiError):
    """A valid request that finds no room, or no engine. Telemetry counts it by its code."""


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The refusal of one field of a body."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(name: str, names: Sequence[str], shown: int | None = None) -> ApiError:
    """The refusal of a model that nobody serves. `shown` bounds how many of the served names it lists."""
    served = ", ".join(f"`{each}`" for each in names[:shown])
    message = f"the model `{name[:100]}` does not exist; this server has {served}"
    return ApiError(404, message, param="model", code="model_not_found")


_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_TYPES = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def engine_not_ready(state: str) -> Rejection:
    """For a request that needs a core which is up."""
    return Rejection(503, f"the engine is {state}", code=f"engine_{state}", retry_after_seconds=2)


def core_lost(state: str) -> ApiError:
    """For every request that is open when the core process dies, or when the time to drain is over."""
    if state == "draining":
        message = "the server is shutting down and could not finish this request; send it again"
        return ApiError(503, message, code="engine_draining", retry_after_seconds=5)
    message = "the engine core died while it worked on this request; it is being restarted, send the request again"
    return ApiError(503, message, code="engine_core_died", retry_after_seconds=2)
