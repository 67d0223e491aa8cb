"""What the prefix cache made of a prompt: the words and the report that core, front, records and probe share.

**Outcomes.** Each prompt token gets exactly one, in this order of precedence, and they sum to the prompt. A prompt of P
tokens could at best reuse (P - 1) // block_size blocks, since the last token is always computed for its logits.

1. `hit`: its block was cached, and the request may read the cache. `hit_host`, `hit_disk`, `hit_remote`: behind
   those, blocks that came from a KV tier, also of an earlier process.
2. `miss_disabled`: its block was computed before, as were all before it, but `prefix_caching` is off or the request
   wants log-probabilities of its prompt.
3. `miss_evicted`: the same, but the block was evicted, or one before it was (then also if another request is
   computing it again at this moment). `evicted_by` names the request that needed its room.
4. `miss_in_flight`: behind those, whole blocks that another running request computes now, for the first time.
5. `miss_sub_block`: behind those, tokens that some earlier sequence had in the same place, but that fill no reusable
   block: ends of sequences, beginnings of blocks that go on otherwise, and the last block of a prompt known whole.
6. `miss_diverged`: the rest, if at least one known block stands before it and some known sequence goes on otherwise
   at its first token; `miss_cold`: the rest else, never seen, or new text behind the end of what is known.

`infinite_hit_tokens` = hit + miss_disabled + miss_evicted. `diverged_at` is the number of tokens shared with known
sequences where one of them goes on otherwise, also within the first block; None if none is shared or none goes on.
A sequence is known once its step was read; sequences with other cache salts are not. Of ends the last 64 behind one
prefix are remembered.

*Example*, blocks of 4: `abcdefghij` was served, so that `abcd` and `efgh` are blocks and `ij` an end. Then
`abcdefghiXYZ` may reuse two blocks of the three: if `efgh` was evicted since, it is 4 hit, 4 miss_evicted, 1
miss_sub_block (`i`) and 3 miss_diverged, with `diverged_at` 9. And `abcdefghijKL` would be 8 hit, 2 miss_sub_block
and 2 miss_cold, for `KL` is what comes next in the same conversation.

`prefix_source` is the request, of those that got a place before, whose sequence has the longest common prefix with the
prompt, and `prefix_shared_tokens` is its length. It does not depend on blocks, on eviction or on `prefix_caching`, and
a whole prompt may be shared. Of a live request the prompt counts, computed or not, and its full blocks; of one that
ended, what was computed, which its last token is not. It is exact while nothing was forgotten: see TAILS and
`remembered` of the index.

`repeated_tokens` and `movable_tokens` do not depend on where a text stands: metrics/memory/prompt_repeats.py.
"""

from collections.abc import Iterable, Mapping

import msgspec

# In order of precedence.
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
