"""Which drafts of a step are accepted, and so which tokens it gives each request."""

from sojourn.engine.runner.batch import Batch


def sampled_tokens(batch: Batch, ids: list[int]) -> dict[str, list[int]]:
    """Request id → the tokens that the step gives it, from the ids of its rows. A negative one, which is no token,
    stands last.

    The drafts are certain proposals: a draft is accepted with the probability that the model gives it, and else the row
    is a draw from what the others leave. That is what happens where a row is drawn as always, and counts as long as the
    draws before it equal the drafts (Leviathan et al., 2023; Chen et al., 2023).
    """
    if not batch.has_drafts:
        return dict(zip(batch.request_ids, [[token] for token in ids], strict=True))
    found, row = {}, 0
    for item in batch.items:
        if not item.samples:
            continue
        drawn = ids[row : row + 1 + len(item.drafts)]
        row += len(drawn)
        accepted = 0
        while accepted < len(item.drafts) and drawn[accepted] == item.drafts[accepted]:
            accepted += 1
        found[item.request.id] = item.request.until_end(drawn[: accepted + 1])
    return found
