"""What pieces of evidence of one server say together: one shows what another lacks, and a restart lies between two."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from sojourn.interop.held.held import Held
from sojourn.interop.sources.scrapes import STARTED
from sojourn.triage.series import is_page

# What a log's missing sentence begins with → figures of a page that show it.
SHOWN_BY: Mapping[str, tuple[str, ...]] = {
    "latencies": ("ttft_ms", "tpot_ms", "e2e_ms"), "preemptions": ("preemptions",),
    "prefix cache hit rate": ("hit_rate",),
}  # fmt: skip
NOW = "what happens now"


class Restart(NamedTuple):
    older: Held
    newer: Held

    @property
    def sentence(self) -> str:
        return (
            f"{self.newer.name} is of a newer process than {self.older.name}, or of another server: counters restarted"
        )


def still_open(held: Held, others: Sequence[Held], restarts: Sequence[Restart]) -> list[str]:
    """What a piece of evidence lacks, and no page of its server shows."""
    pages = [] if is_page(held) else [each for each in others if may_be_one(held, each)]
    shown = {figure.name for page in pages if page.figures is not None for figure in page.figures.figures}
    is_newer = any(each.newer is held for each in restarts)
    return [
        f"{NOW}: one page is of the newer process" if is_newer and sentence.startswith(NOW) else sentence
        for sentence in held.missing
        if not shown & set(SHOWN_BY.get(sentence.partition(":")[0].partition(" (")[0], ()))
    ]  # fmt: skip


def may_be_one(log: Held, page: Held) -> bool:
    """Whether a page can be of the process that wrote a log: one kind of server, one model, and it began before the
    log's end."""
    names = log.settings.get("served_model_name"), page.settings.get("model_name")
    if not is_page(page) or log.server is None or log.server != page.server or (all(names) and names[0] != names[1]):
        return False
    began = started(page)
    return not (began and log.series and log.is_wall_clock) or 1e9 * began <= max(row["ns"] for row in log.series)


def restarts_in(held: Sequence[Held]) -> list[Restart]:
    """Pages without a moment that state different beginnings of their processes."""
    return list(_restarts(held))


def _restarts(held: Sequence[Held]) -> Iterator[Restart]:
    pages = [each for each in held if is_page(each) and not each.is_wall_clock and started(each)]
    for first, second in combinations(pages, 2):
        is_one_kind = first.server == second.server
        is_one_model = first.settings.get("model_name") == second.settings.get("model_name")
        if is_one_kind and is_one_model and started(first) != started(second):
            yield Restart(*sorted((first, second), key=started))


def started(page: Held) -> float:
    """When its process began, in seconds since 1970; 0 where it is not stated."""
    return next((float(row["value"]) for row in page.series if row["name"] == STARTED), 0.0)
