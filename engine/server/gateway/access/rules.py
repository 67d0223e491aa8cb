"""The file of tenants and tiers, and the file of keys: read together, checked, and in force all or nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from sojourn.engine.server.gateway.access.keys import KeyEntry, TenantName
from sojourn.engine.server.settings_files import first_fault, read_yaml
from sojourn.metrics.errors import InputError

LIMITS = (
    "requests_per_second", "requests_per_minute", "tokens_per_minute", "input_tokens_per_minute",
    "output_tokens_per_minute", "concurrency",
)  # fmt: skip
MOST_TIERS = 50  # each is a label of metrics
TierName = TenantName


class AccessError(InputError):
    """A file of keys or tenants that cannot be used. The rules in force stay as they are."""


class Tier(BaseModel):
    """What each tenant of a tier may do. None is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    requests_per_second: int | None = Field(None, ge=1, le=1_000_000)
    requests_per_minute: int | None = Field(None, ge=1, le=1_000_000)
    tokens_per_minute: int | None = Field(None, ge=1, le=10**12, description="input and output together")
    input_tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    output_tokens_per_minute: int | None = Field(None, ge=1, le=10**12)
    concurrency: int | None = Field(None, ge=1, le=100_000, description="open calls, in one front process")
    on_limit: Literal["reject", "queue"] = "reject"
    queue_size: int = Field(64, ge=1, le=100_000, description="calls of a tenant that may wait")
    queue_seconds: float = Field(10.0, gt=0, le=600, strict=False, description="the longest wait for one limit")
    expected_output_tokens: int = Field(256, ge=1, le=10**9, description="reserved for a choice without max_tokens")
    max_tokens: int | None = Field(None, ge=1, le=10**9, description="output tokens of one choice")
    models: list[str] | None = Field(None, min_length=1, description="names of models; None allows all")
    priority: int | None = Field(0, ge=-(2**31), lt=2**31, description="lower goes first; None leaves it to the body")
    weight: int = Field(1, ge=1, le=1000, description="share of a tenant under policy fair-share")
    moderation: str | None = Field(None, min_length=1, description="profile of moderation")

    @property
    def has_limits(self) -> bool:
        return any(getattr(self, name) is not None for name in LIMITS)


UNLIMITED = Tier(priority=None)  # without a file of tenants


class AccessFile(BaseModel):
    """The file of tenants and tiers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    default_tier: str = Field(description="tier of tenants that the file does not name")
    tiers: dict[TierName, Tier] = Field(min_length=1, max_length=MOST_TIERS)
    tenants: dict[TenantName, str] = Field({}, max_length=100_000, description="name → tier")
    storage: str = Field("memory", pattern=r"^(memory|rediss?://.+)$", description="of the counts of limits")
    on_storage_failure: Literal["open", "closed"] = Field("open", description="open admits, closed answers 503")

    @model_validator(mode="after")
    def _tiers_exist(self) -> "AccessFile":
        for user, tier in {"default_tier": self.default_tier, **self.tenants}.items():
            if tier not in self.tiers:
                raise ValueError(f"{user} has the tier {tier!r}, which `tiers` does not have")
        return self


@dataclass(frozen=True, slots=True)
class Tenant:
    """In whose name a call is made. `limits_key` names the counters that it uses up."""

    name: str
    tier_name: str
    tier: Tier
    is_admin: bool
    limits_key: str
    key_id: str = ""


@dataclass(frozen=True)
class AccessRules:
    """What is in force: a snapshot of both files."""

    file: AccessFile | None = None
    keys: Mapping[str, KeyEntry] = field(default_factory=dict)
    needs_key: bool = False

    @cached_property
    def tier_names(self) -> tuple[str, ...]:
        return tuple(self.file.tiers) if self.file is not None else ("default",)

    def tenant(self, name: str, *, is_admin: bool = False, key_id: str = "") -> Tenant:
        """Without a key, all tenants that the file does not name share one set of limits: anyone can invent a name."""
        if self.file is None:
            return Tenant(name, "default", UNLIMITED, is_admin, name if key_id else "", key_id)
        tier_name = self.file.tenants.get(name, self.file.default_tier)
        is_known = bool(key_id) or name in self.file.tenants
        return Tenant(name, tier_name, self.file.tiers[tier_name], is_admin, name if is_known else "", key_id)


def load_rules(access: Path | None, keys: Path | None) -> AccessRules:
    """Raises AccessError with a sentence: the file, the place in it and the way out."""
    file = None if access is None else _check(access, TypeAdapter(AccessFile))
    entries = [] if keys is None else _check(keys, TypeAdapter(list[KeyEntry]))
    by_id = {entry.id: entry for entry in entries}
    if len(by_id) != len(entries):
        raise AccessError(f"{keys} has two keys of one id; remove one of the lines")
    return AccessRules(file, by_id, needs_key=keys is not None)


def _check(path: Path, form: TypeAdapter) -> Any:
    try:
        content = read_yaml(path)
    except InputError as error:
        raise AccessError(str(error)) from None
    try:
        return form.validate_python([] if content is None and form.core_schema["type"] == "list" else content)
    except ValidationError as invalid:
        raise AccessError(f"{path}: {first_fault(invalid)}") from None
