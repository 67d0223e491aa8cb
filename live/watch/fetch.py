"""One answer over HTTP: a page of /metrics, Prometheus' API, a server's profile endpoint."""

import http.client
import os
import re
import socket
import ssl
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urldefrag, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from sojourn.metrics.errors import InputError, ServerError

API_KEY_VARIABLE = "SOJOURN_API_KEY"  # a secret: read from the environment, never written anywhere
LARGEST = 64 << 20  # bytes of an answer that are read
MOST_REDIRECTS = 5
PROBE_S = 2.0  # for the question which of http and https a port speaks
OF_SERVER = re.compile(r"(/v1(/.*)?|/metrics|/health|/docs|/openapi\.json)$")  # paths below a server's address
PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[\w.:%-]+")  # a name, an address of IPv4, or one of IPv6
HOST_AND_PORT = re.compile(r"([\w.-]+|\[[\w:%.]+\]):\d+(/.*)?")


def within_one_server(url: str, location: str) -> str | None:
    """Where a redirect of `url` leads if it keeps scheme, host and port: a key is for the named server only."""
    try:
        to = urldefrag(urljoin(url, location)).url
        here, there = urlsplit(url), urlsplit(to)
        same = (here.scheme, here.hostname, here.port or PORTS.get(here.scheme)) == (
            there.scheme, there.hostname, there.port or PORTS.get(there.scheme))  # fmt: skip
    except ValueError:
        return None
    return to if same and not there.username else None


class _OneServer(HTTPRedirectHandler):
    max_redirections = MOST_REDIRECTS

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        if req.data is not None or within_one_server(req.full_url, newurl) is None:  # urllib would make a POST a GET
            return None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(
    url: str, timeout_s: float, data: bytes | None = None, *, has_key: bool = True, named: str = ""
) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of `data` as JSON. `has_key`: the server may get the key of the API.
    Raises ServerError without an answer, which has the `named` address in place of a long query."""
    key = os.environ.get(API_KEY_VARIABLE) if has_key else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if data is not None:
        headers["Content-Type"] = "application/json"
    try:
        with build_opener(_OneServer).open(Request(url, data=data, headers=headers), timeout=timeout_s) as reply:
            return int(reply.status), reply.read(LARGEST)
    except HTTPError as error:
        with error:
            return int(error.code), error.read(LARGEST)
    except (URLError, OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or str(reason) or type(error).__name__
        refused = isinstance(reason, (ConnectionRefusedError, TimeoutError))
        hint = "" if refused else other_scheme(named or url)
        raise ServerError(f"no server answers at {named or url} ({hint or why})") from None


def is_address(word: str) -> bool:
    """Whether a word of the command line is meant as a server's address, and not as the name of a file or a run."""
    return "://" in word or bool(HOST_AND_PORT.fullmatch(word))


def base_of(url: str) -> str:
    """The address of the server itself: without the path of its API or of a page, such as /v1/chat/completions or
    /metrics; `host:port` gets http. Every verb that takes a server's address reads it here. Raises InputError."""
    text = url.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        _ = parts.port
    except ValueError as error:
        raise InputError(f"{url!r} is no address: {error}; give one such as http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not HOST.fullmatch(parts.hostname or ""):
        raise InputError(f"{url!r} is no http address; give one such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or parts.username:
        raise InputError(f"{url!r} has more than a host, a port and a path; keys go into {API_KEY_VARIABLE}")
    return f"{parts.scheme}://{parts.netloc}{OF_SERVER.sub('', parts.path.rstrip('/'))}"


def name_cut(url: str) -> str:
    """A sentence where an address had the path of one endpoint, which is left out; "" for /v1 and /metrics."""
    base, given = base_of(url), url.strip().rstrip("/")
    path = urlsplit(given if "://" in given else f"http://{given}").path.removeprefix(urlsplit(base).path)
    return "" if path in ("", "/v1", "/metrics") else f"takes {base} as the server; {path} is one of its paths"


def other_scheme(url: str) -> str:
    """A sentence where the port of an address answers, but in the other of http and https; else "". Asked only where
    a request has failed."""
    parts = urlsplit(url)
    scheme, host = {"http": "https", "https": "http"}.get(parts.scheme, ""), parts.hostname or ""
    try:
        with socket.create_connection((host, parts.port or PORTS[parts.scheme]), PROBE_S) as bare:
            if scheme == "https":
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                context.wrap_socket(bare, server_hostname=host).close()
            else:
                bare.settimeout(PROBE_S)
                bare.sendall(f"HEAD / HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
                if not bare.recv(5).startswith(b"HTTP/"):
                    return ""
    except (OSError, ValueError, KeyError):
        return ""
    return f"it speaks {scheme}: give {parts._replace(scheme=scheme, netloc=parts.netloc).geturl()}"
