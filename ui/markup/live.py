"""Live servers as HTML: the verdict, the figures of now, a line for each server, what changed."""

from collections.abc import Sequence

from sojourn.live.watch.document import Watch, WatchedServer
from sojourn.live.watch.steady import Change, clock
from sojourn.ui.figures import live as figures
from sojourn.ui.markup import fragments
from sojourn.ui.text import number, percent, prose, safe
from sojourn.ui.theme import STATE_COLOURS

PLACES = ("p50", "p90", "p99")
# state → one of a run
COLOUR_OF = {"idle": "healthy", "cannot tell": "inconclusive", "unreachable": "invalid"}


def headline(server: WatchedServer) -> str:
    colour = STATE_COLOURS[COLOUR_OF.get(server.state, server.state)]
    return fragments.wrap(
        f'<div class="sj-headline" style="--state:{colour}"><div class="sj-state">{safe(server.state)}</div>'
        f'<div class="sj-sentence">{prose(server.headline)}</div></div>'
    )


def about(server: WatchedServer, at: str) -> str:
    failed = f", {server.failed_scrapes} failed" if server.failed_scrapes else ""
    return (
        f"{server.title} at {server.name}, {server.scrapes} scrapes of /metrics{failed} over {server.window_s:.0f} s; "
        f"as of {at}"
    )


def tiles(server: WatchedServer) -> str:
    """What an operator asks first; a dash for what the server does not show."""
    now = server.now
    seconds = f"over {server.window_s:.0f} s"
    items: list[tuple[str, str, str, str]] = []
    for name, field, unit in (
        ("output", "output_tokens_per_s", "tokens/s"),
        ("requests", "requests_per_s", "req/s"),
    ):  # fmt: skip
        items.append((name, number(_rounded(getattr(now, field, None))), unit, "over 10 s"))
    for name in ("running", "waiting"):
        items.append((name, number(getattr(now, name, None)), "requests", "at the last scrape"))
    items.append(("KV use", percent(getattr(now, "kv_use", None)), "", "at the last scrape"))
    for name, value in (("TTFT", server.ttft_ms), ("TPOT", server.tpot_ms)):
        items.append((name, number(_rounded(value)), "ms", f"mean {seconds}"))
    if server.goodput_rps is not None:
        low, high = (float(f"{each:.3g}") for each in server.goodput_rps)
        items.append(("goodput", number(low) if low == high else f"{number(low)} to {number(high)}", "req/s", seconds))
    if server.good_tokens_per_s is not None:
        items.append(("good tokens", number(_rounded(server.good_tokens_per_s)), "tokens/s", "by the server’s own SLO"))
    items.append(("prefix hits", percent(server.hit_rate), "", f"of the prompt tokens {seconds}"))
    return fragments.tiles(items)


def percentiles(server: WatchedServer) -> str:
    rows = [
        [each.latency, f"{each.samples:,}", number(_rounded(each.mean_ms), "ms"),
         *(figures.between(*each.between_ms[place]) if place in each.between_ms else "–" for place in PLACES)]
        for each in server.percentiles
    ]  # fmt: skip
    return fragments.table(["latency", "samples", "mean", *PLACES], rows, right=(1, 2, 3, 4, 5))


def met(server: WatchedServer) -> str:
    rows = [
        [f"{each.klass}: {each.objective}" if each.klass else each.objective, _between(each.at_least, each.at_most),
         f"{each.requests:,}", each.source]
        for each in server.met
    ]  # fmt: skip
    return fragments.table(["objective", "met by", "requests", "from"], rows, right=(2,))


def servers(watch: Watch) -> str:
    rows = []
    for each in watch.servers:
        now = each.now
        rows.append([
            each.name.removeprefix("http://"), each.state, number(_rounded(getattr(now, "requests_per_s", None))),
            number(_rounded(getattr(now, "output_tokens_per_s", None))), number(getattr(now, "running", None)),
            number(getattr(now, "waiting", None)), percent(getattr(now, "kv_use", None)),
            number(_rounded(each.ttft_ms)), each.headline,
        ])  # fmt: skip
    columns = ["server", "state", "req/s", "tokens/s", "running", "waiting", "KV use", "TTFT (ms)", "verdict"]
    return fragments.table(columns, rows, right=(2, 3, 4, 5, 6, 7))


def sentences(found: Sequence[str]) -> str:
    return fragments.wrap("".join(f'<div class="sj-warning">{prose(each)}</div>' for each in found))


def changes(said: Sequence[Change]) -> str:
    """The last of what was said, newest first."""
    rows = [[clock(change.ns), change.server, change.state, change.sentence] for change in reversed(said)]
    return fragments.table(["at", "server", "state", "what was said"], rows)


def profile(found: dict) -> str:
    """The classes of a burst of profiled steps."""
    rows = [
        [name, number(each["ns"] / 1e6, "ms"), percent(each["share"])]
        for name, each in sorted(found["classes"].items(), key=lambda item: -item[1]["ns"])
    ]
    return fragments.table(["class", "time", "share"], rows, right=(1, 2))


def _between(low: float, high: float) -> str:
    return percent(low) if round(low, 3) == round(high, 3) else f"{percent(low)} to {percent(high)}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
