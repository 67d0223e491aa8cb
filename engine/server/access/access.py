"""The rules in force, who a request comes from by them, and the state of all tenants' limits."""

import asyncio
import logging
import os
from pathlib import Path

from starlette._utils import get_route_path
from starlette.types import Scope

from engine.config import EngineConfig
from engine.server.access.gate import Gate
from engine.server.access.keys import Scope as KeyScope
from engine.server.access.keys import find_key, presented_keys
from engine.server.access.rate_limits import RateLimits
from engine.server.access.rules import AccessError, AccessRules, Tenant, load_rules
from engine.server.errors import ApiError
from metrics.export.prometheus import Exporter

log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0  # between two looks at the files
OPEN_PATHS = ("/health", "/ready")  # for load balancers, unless `open_health` is off
TENANT_HEADER = b"x-sojourn-tenant"


class Access:
    """Raises AccessError where the files cannot be used."""

    def __init__(self, config: EngineConfig, exporter: Exporter):
        self._config = config
        self._exporter = exporter
        self._files = [path for path in (config.access, config.api_keys) if path is not None]
        self._gates: dict[str, Gate] = {}
        self._stamps = self._stamp()
        self.rules = load_rules(config.access, config.api_keys)
        self.rates = self._make_rates(self.rules)

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def identify(self, scope: Scope) -> Tenant:
        """In whose name a request is made. Raises ApiError 401 without a valid key, 403 for a route that is not its."""
        headers = scope["headers"]
        named = next((value.decode("latin-1")[:128] for name, value in headers if name == TENANT_HEADER), "")
        if not self.rules.needs_key:
            return self.rules.tenant(named, is_admin=True)
        needed = self._needed_scope(scope)
        presented = presented_keys(headers)
        if not presented and needed is None:
            return self.rules.tenant("")
        entry = find_key(next(iter(presented)), self.rules.keys) if len(presented) == 1 else None
        if entry is None:
            raise self._unauthorized("invalid" if presented else "missing")
        if needed is not None and entry.scope not in (needed, "admin"):
            self._exporter.observe_unauthorized("forbidden")
            message = f"this key has the scope {entry.scope}, and this route needs {needed}; use a key that has it"
            raise ApiError(403, message, code="insufficient_scope")
        is_admin = entry.scope == "admin"
        name = named if is_admin and named else entry.tenant  # others cannot act in another's name
        return self.rules.tenant(name, is_admin=is_admin, key_id=entry.id)

    def gate(self, tenant: Tenant) -> Gate:
        """The files and the keys bound how many there are."""
        return self._gates.setdefault(tenant.limits_key, Gate())

    def observe_limited(self, tenant: Tenant, reason: str) -> None:
        self._exporter.observe_limited(tenant.tier_name, reason)

    def reload(self) -> None:
        """Puts the files in force, all or nothing. Raises AccessError, and the old rules stay."""
        self._stamps = self._stamp()  # `watch` need not read what is read now
        try:
            rules = load_rules(self._config.access, self._config.api_keys)
        except AccessError as error:
            self._exporter.observe_access_reload("failed")
            log.error("the old rules of access stay in force: %s", error)
            raise
        has_other_storage = _storage(rules) != _storage(self.rules)
        self.rules = rules
        if has_other_storage:
            self.rates = self._make_rates(rules)
        for gate in self._gates.values():  # a limit may be higher now
            gate.requests.wake()
        self._exporter.observe_access_reload("ok")
        log.warning("new rules of access are in force: %d tiers, %d keys", len(rules.tier_names), len(rules.keys))

    def reload_or_log(self) -> None:
        """`reload` for callers that wait for no answer: the log and a metric have it."""
        try:
            self.reload()
        except AccessError:
            return

    async def watch(self) -> None:
        """Reloads the files when they change, for as long as the server runs."""
        while self._files:
            await asyncio.sleep(WATCH_SECONDS)
            stamps = await asyncio.to_thread(self._stamp)
            if stamps != self._stamps:
                self._stamps = stamps
                self.reload_or_log()

    def _needed_scope(self, scope: Scope) -> KeyScope | None:
        """The strictest scope of the path as it came and as the router reads it; None for an open one."""
        needed = {self._scope_of(path) for path in (scope["path"], get_route_path(scope))}
        return next((strict for strict in ("admin", "api", "metrics") if strict in needed), None)

    def _scope_of(self, path: str) -> KeyScope | None:
        if path in OPEN_PATHS and self._config.open_health:
            return None
        if path == "/metrics":
            return "metrics"
        return "admin" if path.lower().lstrip("/").startswith("debug") else "api"

    def _unauthorized(self, reason: str) -> ApiError:
        self._exporter.observe_unauthorized(reason)
        way = "send one as `Authorization: Bearer sk-…` or `x-api-key: sk-…`"
        said = "no API key was sent" if reason == "missing" else "the API key is not valid here"
        return ApiError(401, f"{said}; {way}", code="invalid_api_key")

    def _make_rates(self, rules: AccessRules) -> RateLimits:
        return RateLimits(rules.file, self._exporter.observe_limit_storage_failure)

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [_stamp_of(path) for path in self._files]


def _storage(rules: AccessRules) -> tuple[str, str] | None:
    return rules.file and (rules.file.storage, rules.file.on_storage_failure)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
