"""The rules in force, who a request comes from by them, and the state of all tenants' limits."""

import asyncio
import contextlib
import logging
from weakref import WeakValueDictionary

from limits.errors import ConfigurationError
from starlette._utils import get_route_path
from starlette.types import Scope

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.gateway.access.gate import Gate
from sojourn.engine.server.gateway.access.keys import Scope as KeyScope
from sojourn.engine.server.gateway.access.keys import find_key, presented_keys
from sojourn.engine.server.gateway.access.rate_limits import RateLimits
from sojourn.engine.server.gateway.access.rules import AccessError, AccessRules, Tenant, load_rules
from sojourn.engine.server.settings_files import stamps_of
from sojourn.interop.exported.prometheus import Exporter

log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0  # between two looks at the files
OPEN_PATHS = ("/health", "/ready", "/query")  # for load balancers and proxies, unless `open_health` is off
TENANT_HEADER = b"x-sojourn-tenant"


class Access:
    """Raises AccessError where the files cannot be used."""

    def __init__(self, config: EngineConfig, exporter: Exporter):
        self._config = config
        self._exporter = exporter
        self._files = [path for path in (config.access, config.api_keys) if path is not None]
        self._gates: WeakValueDictionary[str, Gate] = WeakValueDictionary()
        self._stamps = stamps_of(self._files)
        self._reloading = asyncio.Lock()
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
        """Of all open calls of a tenant, which hold it: an administrator may act for any number of tenants."""
        return self._gates.setdefault(tenant.limits_key, Gate())

    def observe_limited(self, tenant: Tenant, reason: str) -> None:
        self._exporter.observe_limited(tenant.tier_name, reason)

    async def reload(self) -> None:
        """Puts the files in force, all or nothing. Raises AccessError, and the old rules stay."""
        async with self._reloading:  # the rules of the latest reading stay
            self._stamps = stamps_of(self._files)  # `watch` need not read what is read now
            try:
                # Thousands of keys take seconds, and no stream waits for them.
                rules = await asyncio.to_thread(load_rules, self._config.access, self._config.api_keys)
                is_same = _storage(rules) == _storage(self.rules)
                rates = self.rates if is_same else self._make_rates(rules)
            except AccessError as error:
                self._exporter.observe_access_reload("failed")
                log.error("the old rules of access stay in force: %s", error)
                raise
            self.rules, self.rates = rules, rates
            for gate in self._gates.values():  # a limit may be higher now
                gate.requests.wake()
            self._exporter.observe_access_reload("ok")
            log.warning("new rules of access are in force: %d tiers, %d keys", len(rules.tier_names), len(rules.keys))

    def reload_soon(self) -> None:
        """`watch` reads the files again, also where they look unchanged."""
        self._stamps = []

    async def watch(self) -> None:
        """Reloads the files when they change, for as long as the server runs."""
        while self._files:
            await asyncio.sleep(WATCH_SECONDS)
            stamps = await asyncio.to_thread(stamps_of, self._files)
            if stamps != self._stamps:
                with contextlib.suppress(AccessError):  # the log and a metric have it
                    await self.reload()

    def _needed_scope(self, scope: Scope) -> KeyScope | None:
        """The strictest scope of the path as it came and as the router reads it; None for an open one."""
        needed = {self._scope_of(path) for path in (scope["path"], get_route_path(scope))}
        return next((strict for strict in ("admin", "api", "metrics") if strict in needed), None)

    def _scope_of(self, path: str) -> KeyScope | None:
        if path in OPEN_PATHS and self._config.open_health:
            return None
        if path == "/metrics":
            return "metrics"
        plain = path.lower().strip("/")
        is_admin = plain.startswith("debug") or plain.endswith("load_lora_adapter") or plain in ("sleep", "wake_up")
        return "admin" if is_admin else "api"

    def _unauthorized(self, reason: str) -> ApiError:
        self._exporter.observe_unauthorized(reason)
        way = "send one as `Authorization: Bearer sk-…` or `x-api-key: sk-…`"
        said = "no API key was sent" if reason == "missing" else "the API key is not valid here"
        return ApiError(401, f"{said}; {way}", code="invalid_api_key")

    def _make_rates(self, rules: AccessRules) -> RateLimits:
        """Raises AccessError."""
        try:
            return RateLimits(rules.file, self._exporter.observe_limit_storage_failure)
        except (ConfigurationError, ValueError) as error:  # its text may hold the address, and that a password
            message = f"{self._config.access}: storage is not valid ({type(error).__name__}); correct the address"
            raise AccessError(f"{message}, or install the extra `redis` of sojourn") from None


def _storage(rules: AccessRules) -> tuple[str, str] | None:
    return rules.file and (rules.file.storage, rules.file.on_storage_failure)
