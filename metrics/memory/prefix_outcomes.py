"""What the prefix cache made of a prompt: the words and the report that core, front and records share."""

from collections.abc import Iterable, Mapping

import msgspec

# In order of precedence; `engine/memory/shadow/observer.py` defines each of them.
PREFIX_OUTCOMES = (
    "hit", "hit_host", "hit_disk", "hit_remote", "hit_peer",
    "miss_disabled", "miss_evicted", "miss_in_flight", "miss_sub_block", "miss_diverged", "miss_cold",
)  # fmt: skip
HITS = ("hit", "hit_host", "hit_disk", "hit_remote", "hit_peer")  # on the device, and in KV tiers below it
RATIOS = (0.5, 1.0, 2.0, 4.0, 8.0)  # sizes of a pool, as multiples of the one that runs


def hit_tokens(outcomes: Mapping[str, float]) -> float:
    """Tokens, or their share, that were not computed, wherever their KV was."""
    return sum(outcomes.get(outcome, 0) for outcome in HITS)


class PrefixReport(msgspec.Struct, frozen=True, array_like=True):
    """Of one prompt at its first query, in tokens. The fields are those of RequestRecord."""

    prefix_outcomes: dict[str, int]
    infinite_hit_tokens: int
    diverged_at: int | None
    evicted_by: dict[str, int]
    evicted_ago_ns: int | None
    resized_hit_tokens: list[int]
    prefix_source: str | None = None
    prefix_shared_tokens: int = 0
    repeated_tokens: int | None = None
    movable_tokens: int | None = None


def combined(reports: Iterable[PrefixReport]) -> PrefixReport:
    """Of several prompts of one call: tokens add up, of `ago` the least.

    `diverged_at`, the source and what is shared with it are of the first prompt; repeats of those that were looked at.
    """
    outcomes: dict[str, int] = {}
    evicted_by: dict[str, int] = {}
    infinite, repeated, movable, first, ago, resized = 0, None, None, None, None, None
    for report in reports:
        first = first or report
        for total, part in ((outcomes, report.prefix_outcomes), (evicted_by, report.evicted_by)):
            for key, tokens in part.items():
                total[key] = total.get(key, 0) + tokens
        infinite += report.infinite_hit_tokens
        if report.repeated_tokens is not None:
            repeated = (repeated or 0) + report.repeated_tokens
            movable = (movable or 0) + (report.movable_tokens or 0)
        if report.evicted_ago_ns is not None:
            ago = report.evicted_ago_ns if ago is None else min(ago, report.evicted_ago_ns)
        parts = report.resized_hit_tokens
        resized = parts if resized is None else [a + b for a, b in zip(resized, parts, strict=True)]
    if first is None:
        return PrefixReport({}, 0, None, {}, None, [])
    source = first.prefix_source and first.prefix_source.split("#", 1)[0]  # the call of that sequence
    return PrefixReport(
        outcomes, infinite, first.diverged_at, evicted_by, ago, resized or [], source, first.prefix_shared_tokens,
        repeated, movable,
    )  # fmt: skip
