"""What a call costs its tenant: by tokens and by device time, from a price list in YAML.

Amounts are decimals, so that sums are exact. What the machine costs its owner is in `metrics.results.prices`.
"""

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sojourn.metrics.errors import InputError
from sojourn.metrics.usage.record import STATUSES, UsageRecord

MILLION = 1_000_000  # tokens, which price lists count in
ANY_MODEL = "*"
NS_PER_MS = 1_000_000


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one model or adapter. What is left out costs nothing; cached input costs what input does."""

    input: Decimal = Decimal(0)  # a million prompt tokens
    cached_input: Decimal | None = None
    output: Decimal = Decimal(0)
    device_second: Decimal = Decimal(0)


class ModelPrices(Prices, frozen=True, kw_only=True, forbid_unknown_fields=True):
    adapters: dict[str, Prices] = {}  # those that are not named cost what the model does


class PriceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`models` by the served name; `*` stands for all others. Calls of another status than `charged` cost nothing."""

    currency: str
    models: dict[str, ModelPrices]
    charged: tuple[str, ...] = ("answered", "cancelled")

    def prices_of(self, model: str, adapter: str | None) -> Prices | None:
        found = self.models.get(model) or self.models.get(ANY_MODEL)
        return found.adapters.get(adapter, found) if found is not None and adapter is not None else found

    def priced(self, record: UsageRecord) -> UsageRecord:
        """The record with its prices. That of the device is None where its time is not known."""
        prices = self.prices_of(record.model, record.adapter)
        if prices is None:
            return msgspec.structs.replace(record, price_of_tokens=None, price_of_device=None, currency=self.currency)
        is_charged = record.status in self.charged
        cached_price = prices.input if prices.cached_input is None else prices.cached_input
        tokens = (
            (record.prompt_tokens - record.cached_tokens) * prices.input
            + record.cached_tokens * cached_price
            + record.output_tokens * prices.output
        ) / MILLION
        device = None
        if record.device_ms is not None:
            device_ns = round(record.device_ms * NS_PER_MS)
            device = device_ns * prices.device_second / 1_000_000_000 if is_charged else Decimal(0)
        return msgspec.structs.replace(
            record, price_of_tokens=tokens if is_charged else Decimal(0), price_of_device=device, currency=self.currency
        )


def load_price_list(path: Path) -> PriceList:
    """Raises InputError where it cannot be read, or a price is no amount."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # amounts stay text, and exact
        prices = msgspec.convert(document, PriceList, strict=False)
        _check(prices)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the price list {path} cannot be read: {error}") from None
    except (yaml.YAMLError, msgspec.ValidationError, InvalidOperation, ValueError) as error:
        raise InputError(f"the price list {path} is not one: {error}; docs/usage.md has an example") from None
    return prices


def _check(prices: PriceList) -> None:
    """Raises ValueError."""
    if unknown := [status for status in prices.charged if status not in STATUSES]:
        raise ValueError(f"charged: {unknown[0]!r} is no status; give {', '.join(STATUSES)}")
    for name, model in prices.models.items():
        adapters = {f"{name}.adapters.{adapter}": listed for adapter, listed in model.adapters.items()}
        for place, listed in ({name: model} | adapters).items():
            for kind, amount in _amounts(listed):
                if not amount.is_finite() or amount < 0:
                    raise ValueError(f"models.{place}.{kind} is {amount}; give an amount of 0 or more")


def _amounts(prices: Prices) -> list[tuple[str, Any]]:
    named = [(name, getattr(prices, name)) for name in Prices.__struct_fields__]
    return [(name, amount) for name, amount in named if amount is not None]
