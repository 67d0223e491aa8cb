"""A server's address, and the few requests outside the measurement."""

import http.client
import json
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sojourn.live.watch.fetch import API_KEY_VARIABLE, MOST_REDIRECTS, PORTS, base_of, other_scheme, within_one_server
from sojourn.metrics.errors import ServerError


class EndpointError(ServerError):
    """A server that does not answer, or not as one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens, and how it is spoken to. `path` is what stands before /v1, "" for most servers;
    `headers` go with each request."""

    scheme: str
    host: str
    port: int
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    verify_tls: bool = True

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def origin(self) -> str:
        return self.url.removesuffix(self.path)

    @property
    def authority(self) -> str:
        return urlsplit(self.url).netloc

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that opens with its first request."""
        if self.scheme == "https":
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.tls())
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def tls(self) -> ssl.SSLContext:
        """What certificates are trusted: of the system or of SSL_CERT_FILE, or any without `verify_tls`."""
        context = ssl.create_default_context()
        if not self.verify_tls:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def own_headers(self) -> dict[str, str]:
        """The scenario's headers with the environment's values, and the key where they have none. Raises
        EndpointError."""
        stated = {name: _VARIABLE.sub(_of_environment(name), value) for name, value in self.headers.items()}
        has_own = any(name.lower() == "authorization" for name in stated)
        return stated if has_own else stated | authorisation()


_VARIABLE = re.compile(r"\$\{(\w+)\}")


def _of_environment(header: str) -> Callable[[re.Match[str]], str]:
    def value(found: re.Match[str]) -> str:
        try:
            return os.environ[found[1]]
        except KeyError:
            raise EndpointError(
                f"target.headers has {header} with ${{{found[1]}}}; set the environment variable {found[1]}"
            ) from None

    return value


def parse_base_url(url: str, headers: Mapping[str, str] | None = None, verify_tls: bool = True) -> Endpoint:
    """`http://host:port`, or `host:port`, with or without a path and a final /v1. Raises InputError."""
    parts = urlsplit(base_of(url))
    return Endpoint(parts.scheme, str(parts.hostname), parts.port or PORTS[parts.scheme], parts.path,
                    headers or {}, verify_tls)  # fmt: skip


def authorisation() -> dict[str, str]:
    """The header with the key, where the environment has one."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def get(endpoint: Endpoint, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of a GET, by redirects within the server. Of one that leads to another server the body is a
    sentence that says so. Raises EndpointError without an answer."""
    url = endpoint.url + path
    for _ in range(MOST_REDIRECTS + 1):
        status, body, location = _get(endpoint, urlsplit(url)._replace(scheme="", netloc="").geturl(), timeout_s)
        if not 300 <= status < 400 or not location:
            return status, body
        to = within_one_server(url, location)
        if to is None:
            return status, f"redirected to another server: {location}".encode()
        url = to
    return status, f"redirected more than {MOST_REDIRECTS} times".encode()


def _get(endpoint: Endpoint, target: str, timeout_s: float) -> tuple[int, bytes, str | None]:
    connection = endpoint.connection(timeout_s)
    try:
        connection.request("GET", target, headers={"Connection": "close", **endpoint.own_headers()})
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.getheader("location")
    except (OSError, http.client.HTTPException, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        refused = isinstance(error, (ConnectionRefusedError, TimeoutError))
        if not refused and (hint := other_scheme(endpoint.url)):
            raise EndpointError(f"no server answers at {endpoint.url}: {hint}") from None
        raise EndpointError(
            f"no server answers at {endpoint.url} ({reason}); start one, for example with `sojourn serve tiny-model`, "
            "or correct the address"
        ) from None
    finally:
        connection.close()


def served_models(endpoint: Endpoint) -> list[dict[str, Any]]:
    """The models of GET /v1/models. Raises EndpointError if it names none."""
    status, body = get(endpoint, "/v1/models")
    try:
        models = json.loads(body)["data"] if status == 200 else []
        names = [model["id"] for model in models]
    except (ValueError, KeyError, TypeError):
        names = []
    if status in (401, 403):
        raise EndpointError(
            f"{endpoint.url} refuses the key (HTTP {status}: {_message(body)}); "
            f"set the environment variable {API_KEY_VARIABLE} to a key of this server"
        )
    if not names:
        raise EndpointError(
            f"{endpoint.url}/v1/models names no model (HTTP {status}: {body[:120].decode(errors='replace')!r}); "
            "is it an OpenAI-compatible server? If it is, name the model in target.model"
        )
    return models


def _message(body: bytes) -> str:
    """The sentence of an error of OpenAI's shape, or how another body begins."""
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return repr(body[:120].decode(errors="replace"))


def served_model(endpoint: Endpoint, name: str | None) -> dict[str, Any]:
    """The entry of the model of that name, or of the first; only its `id` where the server lists none. Raises
    EndpointError without an answer, and where the server lists models but not this one."""
    if name is None:
        return served_models(endpoint)[0]
    get(endpoint, "/health")  # any answer will do: the server need not list a model that is named
    try:
        models = served_models(endpoint)
    except EndpointError:
        return {"id": name}
    for model in models:
        if model["id"] == name:
            return model
    known = ", ".join(str(model["id"]) for model in models)
    raise EndpointError(f"{endpoint.url} serves no model {name!r}; it lists: {known}")
