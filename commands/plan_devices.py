"""GPUs that a plan compares: how many of which, what an hour of them costs, and what they would serve."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.commands.cli import out, table
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Change
    from sojourn.replay.device.catalogue import Device
    from sojourn.replay.verdict.plan import Point

MOST_COUNT = 64


class Offers:
    """The devices that `--device` names, and their prices."""

    def __init__(self, words: str, prices: Path | None, recorded_device: str | None) -> None:
        """`words`: "h100_sxm,2xh200_sxm". Raises InputError."""
        from sojourn.replay.device.catalogue import catalogue, device_named, replaced_figures

        self._recorded = recorded_device
        self._devices = catalogue(prices)
        self._offers: dict[str, tuple[int | None, Device]] = {}
        for word in filter(None, (each.strip() for each in words.split(","))):
            count, name = _counted(word)
            self._offers[word] = count, device_named(name, self._devices)
            if given := replaced_figures(name, self._devices):
                raise InputError(
                    f"{prices} gives another {' and '.join(given)} of {name}, and a plan takes kernels measured on the "
                    "device as it is sold; leave it out, or give the device a name of its own to sojourn size"
                )
        if not self._offers:
            raise InputError("--device names no device; give some, such as --device h100_sxm,2xh200_sxm")

    def purchases(self) -> "dict[str, Change]":
        """A change of a replay for each. Without a count the devices are as many as in the run."""
        from sojourn.metrics.prediction import Change

        found = {}
        for word, (count, _) in self._offers.items():
            settings: dict[str, Any] = {"device": _counted(word)[1]}
            if count is not None:
                settings["tensor_parallel"] = count
            if self._recorded is not None:
                settings["recorded_device"] = self._recorded
            found[word] = Change(settings=settings)
        return found

    def figures(self, word: str, point: "Point", recorded_count: int) -> dict[str, float | str | None]:
        """What the device costs at the limit of its rate; power is the maker's limit, so joules are an upper bound."""
        from sojourn.replay.verdict.plan import usd_per_million_tokens

        device = self._offers[word][1]
        count, usd = self.count_and_price(word, recorded_count)
        good_tokens_per_s = point.prediction.output_tokens_per_s * point.attainment
        watts = None if device.watts is None else count * device.watts
        return {
            "devices": count, "usd_per_hour": usd, "price_source": device.price_source,
            "good_output_tokens_per_s": good_tokens_per_s,
            "usd_per_million_good_output_tokens": None if usd is None else usd_per_million_tokens(
                usd, good_tokens_per_s
            ),
            "good_output_tokens_per_joule": None if watts is None else good_tokens_per_s / watts,
        }  # fmt: skip

    def count_and_price(self, word: str, recorded_count: int) -> tuple[int, float | None]:
        """How many devices, and dollars per hour of all of them."""
        stated, device = self._offers[word]
        count = recorded_count if stated is None else stated
        return count, None if device.usd_per_hour is None else count * device.usd_per_hour

    def print(
        self, found: "Mapping[str, Point | None]", recorded_rps: float, recorded_count: int, best_rate: float,
        sentences: Sequence[str],
    ) -> None:  # fmt: skip
        out.print("\n[bold]what these devices would serve, with the best settings[/bold]")
        rows = table("devices", "req/s", "gain", "80%", "good tok/s", "$/h", "$/M good", "tok/J", text=["devices"])
        for word, point in found.items():
            if point is None:
                rows.add_row(word, *["–"] * 7)
                continue
            said, figures = point.prediction, self.figures(word, point, recorded_count)
            rows.add_row(
                f"{word}{'' if said.is_trusted else ' !'}", f"{recorded_rps * point.rate:.3g}",
                f"{point.rate / best_rate - 1:+.0%}",
                "unpredicted" if said.is_open else f"{said.attainment.low:.0%}–{said.attainment.high:.0%}",
                *(_number(figures[name]) for name in (
                    "good_output_tokens_per_s", "usd_per_hour", "usd_per_million_good_output_tokens",
                    "good_output_tokens_per_joule",
                )),
            )  # fmt: skip
        out.print(rows)
        out.print("prices are list prices of one provider, power is the maker's limit; --prices FILE replaces them")
        for sentence in dict.fromkeys(sentences):
            out.print(sentence, markup=False)


def _counted(word: str) -> tuple[int | None, str]:
    """ "2xh200_sxm" → (2, "h200_sxm"). Raises InputError."""
    if (counted := re.fullmatch(r"(\d+)\s*[x×]\s*(\w+)", word)) is None:
        return None, word
    count = int(counted[1])
    if not 1 <= count <= MOST_COUNT:
        raise InputError(f"--device {word}: give 1 to {MOST_COUNT} devices of one replica, such as 2x{counted[2]}")
    return count, counted[2]


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
