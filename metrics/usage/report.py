"""Usage records → sums by tenant, model, day, key, status or route."""

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec

from sojourn.metrics.errors import InputError
from sojourn.metrics.usage.record import STATUSES, UsageRecord

NOBODY = "(none)"  # calls that named no tenant, or had no key
GROUPS: dict[str, Callable[[UsageRecord], str]] = {
    "tenant": lambda record: record.tenant or NOBODY,
    "model": lambda record: f"{record.model}:{record.adapter}" if record.adapter else record.model,
    "day": lambda record: record.time.date().isoformat(),
    "key": lambda record: record.key_id or NOBODY,
    "status": lambda record: record.status,
    "route": lambda record: record.route,
}
_AGES = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class UsageSum(msgspec.Struct, kw_only=True):
    """Sums over the calls of a group. None where no call of it has the figure: compare `calls_with_…`."""

    group: str
    calls: int = 0
    by_status: dict[str, int] = msgspec.field(default_factory=dict)  # of STATUSES, those that occur
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    computed_tokens: int | None = None
    device_ms: float | None = None
    calls_with_device_ms: int = 0
    joules: float | None = None
    calls_with_joules: int = 0
    price_of_tokens: Decimal | None = None
    price_of_device: Decimal | None = None
    currency: str | None = None

    @property
    def status_counts(self) -> str:
        """As "86 answered, 4 interrupted"."""
        return ", ".join(f"{self.by_status[status]:,} {status}" for status in STATUSES if status in self.by_status)

    def add(self, record: UsageRecord) -> None:
        self.calls += 1
        self.by_status[record.status] = self.by_status.get(record.status, 0) + 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens
        self.calls_with_device_ms += record.device_ms is not None
        self.calls_with_joules += record.joules is not None
        for name in ("computed_tokens", "device_ms", "joules", "price_of_tokens", "price_of_device"):
            if (value := getattr(record, name)) is not None:
                setattr(self, name, value if getattr(self, name) is None else getattr(self, name) + value)
        if record.currency is not None:
            if self.currency not in (None, record.currency):
                raise InputError(
                    f"records are priced in {self.currency} and in {record.currency}, which do not add up; give one "
                    "list with --prices"
                )
            self.currency = record.currency


def summed(records: Iterable[UsageRecord], by: str) -> list[UsageSum]:
    """A row a group, in order of its name. `by` is one of GROUPS. Raises InputError where currencies differ."""
    group_of, sums = GROUPS[by], {}
    for record in records:
        group = group_of(record)
        sums.setdefault(group, UsageSum(group=group)).add(record)
    order = STATUSES.index if by == "status" else str
    return sorted(sums.values(), key=lambda row: order(row.group))


def total(records: Iterable[UsageRecord]) -> UsageSum:
    result = UsageSum(group="total")
    for record in records:
        result.add(record)
    return result


def between(records: Iterable[UsageRecord], since: datetime | None, until: datetime | None) -> list[UsageRecord]:
    """The calls that arrived at `since` or later, and before `until`."""
    return [
        record for record in records
        if (since is None or record.time >= since) and (until is None or record.time < until)
    ]  # fmt: skip


def moment(text: str, option: str, now: datetime | None = None) -> datetime:
    """A date or a time in UTC, such as 2026-11-23 or 2026-11-23T10:30, or an age such as 24h. Raises InputError."""
    try:
        if age := re.fullmatch(r"(\d{1,6})([smhd])", text):
            return (now or datetime.now(UTC)) - timedelta(**{_AGES[age[2]]: int(age[1])})
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError):  # such as 999999d, which is before the first year
        raise InputError(
            f"{option} {text!r} is no time; give one in UTC such as 2026-11-23 or 2026-11-23T10:30, or an age such as "
            "90m, 24h or 7d"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
