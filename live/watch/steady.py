"""What is said of a server as time passes: a verdict must stand for some seconds before it is said, or taken back."""

import time
from dataclasses import dataclass

import msgspec

from sojourn.live.watch.document import WatchedServer

LOOKS_FIRST_S = 10.0  # of scrapes, before anything is said of a server
STANDS_S = 5.0  # that what was said must be untrue before a finding takes its place
GONE_S = 10.0  # that what was said must be untrue before it is taken back
WALL_NS = 10**18  # since 1970: beyond it a moment is of the wall clock, as no host is up for 30 years
LOOKING = "Looking: a verdict takes {:.0f} s of scrapes"


@dataclass(frozen=True, slots=True)
class Change:
    """One sentence of what changed. `ns` is the moment of the scrape after which it was said."""

    ns: int
    server: str
    state: str
    sentence: str


def clock(ns: int) -> str:
    """The local time of a moment: of the monotonic clock, or of a Prometheus, whose scrapes have the wall clock's."""
    seconds = ns / 1e9 if ns > WALL_NS else time.time() - (time.monotonic_ns() - ns) / 1e9
    return time.strftime("%H:%M:%S", time.localtime(seconds))


class Steady:
    """Owns what was last said of one server."""

    def __init__(self, looks_s: float = LOOKS_FIRST_S) -> None:
        self._looks_s = looks_s
        self._said: WatchedServer | None = None
        self._untrue_ns: int | None = None  # since when the verdict is no longer what was said

    @property
    def is_settled(self) -> bool:
        """The last verdict is what was said."""
        return self._said is not None and self._untrue_ns is None

    def take(self, ns: int, server: WatchedServer) -> tuple[WatchedServer, list[Change]]:
        """The server as it is to be shown, and the change if there is one."""
        if self._said is not None and server.restarts > self._said.restarts:
            self._said, self._untrue_ns = None, None  # it was said of another process
        if self._said is None and server.state not in ("unreachable", "stuck") and server.window_s < self._looks_s:
            return _with_verdict(server, "cannot tell", LOOKING.format(self._looks_s)), []
        if self._said is None or _name(server) == _name(self._said):
            changed = self._said is None
            self._said, self._untrue_ns = server, None
            return server, [self._change(ns, server)] if changed else []
        if self._untrue_ns is None:
            self._untrue_ns = ns
        if ns - self._untrue_ns >= self._stands_s(server) * 1e9:
            self._said, self._untrue_ns = server, None
            return server, [self._change(ns, server)]
        return msgspec.structs.replace(
            server, state=self._said.state, headline=self._said.headline, findings=self._said.findings,
            unknown=self._said.unknown,
        ), []  # fmt: skip

    def _stands_s(self, server: WatchedServer) -> float:
        if {server.state, self._said.state} & {"unreachable", "stuck"}:
            return 0.0
        if {server.state, self._said.state} <= {"healthy", "idle"}:
            return 0.0
        return STANDS_S if server.findings or server.state == "cannot tell" else GONE_S

    def _change(self, ns: int, server: WatchedServer) -> Change:
        return Change(ns, server.name, server.state, server.headline)


def _name(server: WatchedServer) -> tuple[str, str]:
    """What makes two verdicts the same: figures may differ."""
    first = server.findings[0].key if server.findings else ""
    return server.state, first


def _with_verdict(server: WatchedServer, state: str, headline: str) -> WatchedServer:
    return msgspec.structs.replace(server, state=state, headline=headline, findings=[], unknown=[])
