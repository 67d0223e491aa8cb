"""The moments of a log's lines, as nanoseconds.

A stamp without a year, as vLLM writes it, gives a moment counted from the first one. It is taken for a later year where
it falls back by half a year. A stamp without a zone is the server's own time.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

STAMP = re.compile(
    r"(?P<year>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z)?"
    r"|(?P<m2>\d\d)/(?P<d2>\d\d)/(?P<year2>\d{4})-(?P<clock2>\d\d:\d\d:\d\d)"
    r"|(?<!\d)(?P<m3>\d\d)-(?P<d3>\d\d) (?P<clock3>\d\d:\d\d:\d\d)(?:[.,](?P<part3>\d{1,9}))?(?!\d)"
)
PARTS = ("m", "m2", "m3"), ("d", "d2", "d3"), ("clock", "clock2", "clock3"), ("part", "part3")
YEARLESS = re.compile(r"(?<![\d-])(\d\d-\d\d) \d\d:\d\d:\d\d")
DATED = re.compile(r"20\d\d-(?P<day>\d\d-\d\d)[T ]\d\d:\d\d")  # begins with letters: those are found quickly
PLAIN_YEAR, LEAP_YEAR = 2003, 2004  # that stand for an unknown one: any moment in them is one of a wall clock
LEAP_DAY = re.compile(r"(?<![\d-])02-29 \d\d:\d\d:\d\d")
HALF_A_YEAR_NS = 180 * 86_400 * 10**9
NO_YEAR = "the log's stamps have no year, and no zone: moments are counted from the first"
NO_ZONE = "the log's stamps have no zone: they are read as UTC"


class Clock:
    """Owns the year that a log's stamps are in. Stamps are given in the order of the lines."""

    def __init__(self, year: int | None = None, has_leap_day: bool = False, is_mixed: bool = False):
        self._year = year or (LEAP_YEAR if has_leap_day else PLAIN_YEAR)
        self._knows_year, self._is_mixed = year is not None, is_mixed
        self._last_ns: int | None = None
        self.is_wall_clock = True
        self.note = ""

    def ns(self, stamp: "re.Match[str] | None") -> int | None:
        """Since 1970, or of an unknown year. None for what is no moment."""
        if stamp is None:
            return None
        year = stamp["year"] or stamp["year2"]
        parts = tuple(_first(stamp, names) for names in PARTS)
        if year is not None:
            if self._is_mixed and not self._knows_year:
                return None  # whoever wrote it, it cannot be compared with the stamps without a year
            self.note = self.note or ("" if stamp["zone"] else NO_ZONE)
            return _ns(int(year), *parts)
        self.is_wall_clock, self.note = self._knows_year, NO_ZONE if self._knows_year else NO_YEAR
        found = _ns(self._year, *parts)
        if found is not None and self._last_ns is not None and found < self._last_ns - HALF_A_YEAR_NS:
            self._year += 1
            found = _ns(self._year, *parts)
        self._last_ns = found if found is not None else self._last_ns
        return found


def clock_of(text: str) -> Clock:
    """The year of stamps without one is that of other stamps of the same days, where a log has such."""
    year, has_leap_day, is_mixed = _years(text)
    return Clock(year, has_leap_day, is_mixed=is_mixed)


@lru_cache(maxsize=2)
def _years(text: str) -> tuple[int | None, bool, bool]:
    """The year, whether a stamp without one is of a leap day, and whether there are such stamps."""
    dated = {
        (found[0][:4], found["day"])
        for found in DATED.finditer(text)
        if not text[found.start() - 1 : found.start()].isdigit()
    }
    if not dated:
        return None, LEAP_DAY.search(text) is not None, YEARLESS.search(text) is not None
    days = set(YEARLESS.findall(text))
    years = {year for year, day in dated if day in days}
    return int(years.pop()) if len(years) == 1 else None, "02-29" in days, bool(days)


def stated_elsewhere(moments: Sequence[int | None]) -> bool:
    """Whether whoever carried the log stamped its lines: these moments have year and zone."""
    return bool(moments) and all(each is not None for each in moments)


def _first(stamp: "re.Match[str]", names: tuple[str, ...]) -> str:
    return next((found for found in stamp.group(*names) if found), "")


def _ns(year: int, month: str, day: str, clock: str, part: str) -> int | None:
    second = _second(year, month, day, clock)
    return None if second is None else second * 10**9 + int(part.ljust(9, "0"))


@lru_cache(maxsize=64)
def _second(year: int, month: str, day: str, clock: str) -> int | None:
    """Since 1970. Lines of one second follow each other."""
    hours, minutes, seconds = (int(each) for each in clock.split(":"))
    midnight = _midnight(year, month, day)
    if midnight is None or hours > 23 or minutes > 59 or seconds > 59:
        return None
    return midnight + hours * 3600 + minutes * 60 + seconds


@lru_cache(maxsize=64)
def _midnight(year: int, month: str, day: str) -> int | None:
    try:
        return int(datetime(year, int(month), int(day), tzinfo=UTC).timestamp())
    except (ValueError, OverflowError):
        return None
