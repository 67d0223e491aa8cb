"""A period of the past, as a user writes it, and what a Prometheus holds of a server in it."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import of_period
from sojourn.live.watch.prometheus import HeldScrape, held_scrapes
from sojourn.metrics.errors import InputError

LONGEST_S = 3 * 3600.0  # raw samples of a longer one would be too many
AGO = re.compile(r"-(\d+(?:\.\d+)?)([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
FORM = "FROM..TO, such as 2026-11-28T09:00Z..2026-11-28T09:30Z, 09:00..09:30 (today) or -26h..-25h"


@dataclass(frozen=True, slots=True)
class Period:
    """Seconds since 1970."""

    begin_s: float
    end_s: float

    def __str__(self) -> str:
        begin, end = (datetime.fromtimestamp(each, UTC) for each in (self.begin_s, self.end_s))
        return f"{begin:%Y-%m-%d %H:%M:%S} – {end:%H:%M:%S} UTC"


def read_period(text: str, now: datetime) -> Period:
    """`now` has a time zone, which moments without one are of. Raises InputError."""
    first, dots, last = text.partition("..")
    if not dots:
        raise InputError(f"{text!r} is no period: give {FORM}")
    begin, end = _moment(first, now, text), _moment(last or "-0s", now, text)
    if not begin < end:
        raise InputError(f"{text!r} ends before it begins")
    if (end - begin).total_seconds() > LONGEST_S:
        raise InputError(f"{text!r} is longer than 3 hours: choose a part of it that is typical")
    if end > now + timedelta(seconds=60):
        raise InputError(f"{text!r} lies in the future")
    return Period(begin.timestamp(), end.timestamp())


def _moment(text: str, now: datetime, whole: str) -> datetime:
    text = text.strip()
    if text == "now":
        return now
    if (ago := AGO.fullmatch(text)) is not None:
        return now - timedelta(seconds=float(ago[1]) * SECONDS[ago[2]])
    if re.fullmatch(r"\d{10}(\.\d+)?", text):
        return datetime.fromtimestamp(float(text), UTC)
    try:
        if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
            return datetime.combine(now.date(), datetime.fromisoformat(f"2000-01-01T{text}").time(), now.tzinfo)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{whole!r} is no period: {text!r} is no moment; give {FORM}") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)


def held_in(base: str, period: Period, select: str = "") -> Held:
    """What the Prometheus scraped of one server in the period. Raises InputError where it is of none or of several, and
    ServerError without an answer."""
    scrapes = held_scrapes(base, period.end_s - period.begin_s, select, period.end_s)
    by_target: dict[tuple[str, str], list[HeldScrape]] = {}
    for scrape in scrapes:
        by_target.setdefault(scrape.target, []).append(scrape)
    if not by_target:
        raise InputError(f"{base} holds no metric of a known server in {period}")
    if len(by_target) > 1:
        names = ", ".join(f'instance="{instance}"' for _, instance in sorted(by_target)[:4])
        raise InputError(f"{base} holds {len(by_target)} servers in {period}: choose one with --select '{names}'")
    [found] = by_target.values()
    try:
        return of_period(str(period), [scrape.rows for scrape in found])
    except ValueError as error:
        raise InputError(f"{base} holds too little in {period}: {error}") from None
