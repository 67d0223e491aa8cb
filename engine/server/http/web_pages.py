"""What keeps a foreign web page from driving a developer's server: checks of Host, Origin and content type.

A page can send any site a POST with the types of an HTML form, or with none, and the browser does not ask first. By DNS
rebinding its own name can lead to 127.0.0.1. So a POST must be JSON, `Host` must be a name of this server, and `Origin`
must be this server or an allowed page. https://fetch.spec.whatwg.org/#cors-safelisted-request-header
"""

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sojourn.engine.config import EngineConfig, listed
from sojourn.engine.server.errors import ApiError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they change nothing, and no page can read their answers
SHOWN = 80  # characters of a header in an error

# RFC 3986: a name, an IPv4 address, or an IPv6 address in brackets; then perhaps a port.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~%!$&'()*+,;=-]{1,253})(:[0-9]{0,5})?")
_JSON = re.compile(r"application/([a-z0-9!#$&^_.+-]+\+)?json")


class WebPageGuard:
    """ASGI middleware that refuses requests by `Host`, `Origin` and content type, before anything reads their bodies.

    `on_refusal` takes the code of each refusal.
    """

    def __init__(self, app: ASGIApp, config: EngineConfig, on_refusal: Callable[[str], None]):
        self._app = app
        self._hosts = allowed_hosts(config)
        self._origins = frozenset(listed(config.allowed_origins))
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as refused:
                self._on_refusal(refused.code)
                return await refused.response(scope["path"])(scope, receive, send)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError: 400 for a Host, 403 for an Origin, 415 for a content type."""
        found: dict[bytes, list[str]] = {b"host": [], b"origin": [], b"content-type": [], b"content-encoding": []}
        for name, value in scope["headers"]:
            if name in found:
                found[name].append(value.decode("latin-1"))
        host = _check_host(found[b"host"], scope["http_version"])
        if host is not None and not _is_allowed(host, self._hosts):
            message = f"this server does not answer as the Host {host[:SHOWN]!r}; start it with --allowed-hosts"
            raise ApiError(400, f"{message} if that is its name", code="foreign_host")
        if scope["method"] in SAFE_METHODS:
            return
        for origin in found[b"origin"]:
            if not ("*" in self._origins or origin in self._origins or _is_same(origin, found[b"host"])):
                message = f"web pages of {origin[:SHOWN]!r} may not use this server"
                raise ApiError(403, f"{message}; start it with --allowed-origins to let them", code="foreign_origin")
        _check_type(found[b"content-type"], found[b"content-encoding"])


def with_cors(app: ASGIApp, config: EngineConfig) -> ASGIApp:
    """Answers the questions that browsers ask for pages of `allowed_origins`; without any, the application itself."""
    origins = listed(config.allowed_origins)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"],
    )


def allowed_hosts(config: EngineConfig) -> frozenset[str] | None:
    """Names that `Host` may have; None allows all. A server on a loopback address has loopback names only."""
    if config.allowed_hosts is not None:
        names = frozenset(name.lower() for name in listed(config.allowed_hosts))
        return None if "*" in names else names
    return frozenset() if is_loopback(config.host) else None


def is_loopback(host: str) -> bool:
    """Whether only programs of the same machine reach an address of this name."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761: never asked of a DNS server
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_allowed(host: str, names: frozenset[str] | None) -> bool:
    return names is None or is_loopback(host) or host.rstrip(".").lower() in names


def _check_host(values: list[str], http_version: str) -> str | None:
    """The name without its port; None where HTTP/1.0 left it out. Raises ApiError 400."""
    if not values and http_version == "1.0":
        return None
    if len(values) == 1 and (match := _HOST.fullmatch(values[0])):
        return match[1]
    problem = "needs one Host header" if len(values) != 1 else f"has the Host {values[0][:SHOWN]!r}, which is no host"
    raise ApiError(400, f"the request {problem}; send the server's name and port", code="invalid_host")


def _is_same(origin: str, hosts: list[str]) -> bool:
    """The page comes from this server itself, such as /docs."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and [parts.netloc.lower()] == [host.lower() for host in hosts]


def _check_type(types: list[str], encodings: list[str]) -> None:
    sent, _, parameters = (types[0] if len(types) == 1 else ", ".join(types)).partition(";")
    if not _JSON.fullmatch(sent.strip().lower()):
        shown = f"has the content type {sent[:SHOWN]!r}" if sent else "has no content type"
        message = f"the request {shown}, but this server reads JSON; send the header `Content-Type: application/json`"
        raise ApiError(415, message, code="unsupported_content_type")
    charset = re.search(r"charset\s*=\s*\"?([^\";\s]*)", parameters.lower())
    if charset and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        message = f"the body has the charset {charset[1][:SHOWN]!r}, but JSON is UTF-8; leave the charset out"
        raise ApiError(415, message, code="unsupported_content_type")
    if any(encoding.strip().lower() not in ("", "identity") for encoding in encodings):
        message = f"the body has the content encoding {encodings[0][:SHOWN]!r}, but this server unpacks nothing"
        raise ApiError(415, f"{message}; send it as it is", code="unsupported_content_encoding")
