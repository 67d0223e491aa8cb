"""What the tiers below the device gave a request: the words and the report that core, front and records share."""

from collections.abc import Iterable

import msgspec

TIERS = ("host", "disk", "remote", "peer")  # peer: a prefill server that computed the prompt
DECISIONS = ("load", "recompute")  # the cheaper, by the predictions beside it


class KVLoad(msgspec.Struct, frozen=True, array_like=True):
    """Of one prompt. The fields are those of RequestRecord; without a decision no tier had a part of the prefix."""

    loaded_tokens: dict[str, int]  # tier → tokens of the prompt whose KV came from it
    load_decision: str | None = None
    load_predicted_ns: int | None = None
    recompute_predicted_ns: int | None = None
    load_ns: int = 0  # it waited for the reads of a slow tier, before it could be scheduled
    transfer_bytes: int = 0  # from a prefill server, or held for a decode server
    transfer_ns: int = 0  # what the reads of these bytes took


NOTHING_LOADED = KVLoad({})


def combined_loads(loads: Iterable[KVLoad]) -> KVLoad:
    """Of several prompts of one call: tokens and times add up; the decision is that of the first that has one."""
    tokens: dict[str, int] = {}
    first, waited_ns, moved_bytes, moved_ns = NOTHING_LOADED, 0, 0, 0
    for load in loads:
        for tier, count in load.loaded_tokens.items():
            tokens[tier] = tokens.get(tier, 0) + count
        waited_ns += load.load_ns
        moved_bytes, moved_ns = moved_bytes + load.transfer_bytes, moved_ns + load.transfer_ns
        if first.load_decision is None:
            first = load
    decision = first.load_decision, first.load_predicted_ns, first.recompute_predicted_ns
    return KVLoad(tokens, *decision, waited_ns, moved_bytes, moved_ns)
