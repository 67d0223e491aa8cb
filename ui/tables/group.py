"""The exchanges of a parallel group, shaped for showing."""

from statistics import median

import pandas as pd

from sojourn.metrics.cells import as_objects, lengths
from sojourn.metrics.compute.group_facts import GroupFacts
from sojourn.ui.text import duration, number, percent

EVEN_TOKENS = 4  # of the mean expert of a layer, from which on a step could be even
MEANING = {
    "all_reduce": "sums of what the ranks of a stage computed",
    "all_gather": "parts of the logits",
    "all_to_all": "tokens to the ranks that have their experts",
    "broadcast": "sampled tokens, to the ranks of the first stage",
    "send": "to the next pipeline stage",
    "recv": "from another stage: its wait is the bubble",
}


def collectives(group: GroupFacts) -> pd.DataFrame:
    """A row a kind of exchange, as text."""
    rows = [
        {
            "exchange": each.name.replace("_", "-"),
            "what": MEANING[each.name],
            "MB": number(each.bytes / 1e6),
            "exposed": duration(each.exposed_ns),
            "of the steps": percent(each.exposed_ns / max(group.device_ns, 1.0)),
            "the link needs": "–" if each.link_ns is None else duration(each.link_ns),
            "hidden": "–" if each.hidden_ns is None else duration(each.hidden_ns),
        }
        for each in group.collectives
    ]
    return pd.DataFrame(rows)


def group_sentence(group: GroupFacts) -> str:
    """What the division spares and costs in a step, and how unequal the ranks are."""
    spent, saved = group.exchange_ns / group.steps, group.saved_ns / group.steps
    sentence = (
        f"A step spares each rank {duration(saved)} of computation, and spends {duration(spent)} in exchanges. "
        f"The rank with most work has {group.imbalance:.2f} times the mean."
    )
    if group.shape.pipeline_parallel > 1:
        shares = ", ".join(percent(share) for share in group.bubble_shares)
        sentence += f" Stage by stage, {shares} of the time is a wait for another stage."
    return sentence


def expert_sentence(steps: pd.DataFrame) -> str:
    """How uneven the layers of counted steps were."""
    counted = as_objects(steps[lengths(steps.expert_tokens) > 0])
    shares = [
        sum(map(int, tokens)) / len(tokens) / len(layers)
        for tokens, layers in zip(counted.expert_tokens, counted.expert_imbalance_percent, strict=True)
    ]
    large = counted[[share >= EVEN_TOKENS for share in shares]]
    layers = [int(each) / 100 for cell in large.expert_imbalance_percent for each in cell]
    if not layers:
        return "Every counted step had too few tokens for all experts of a layer."
    return (
        f"Of {number(len(counted))} counted steps, all layers together. In the {number(len(large))} with many tokens "
        f"the busiest expert of a layer had {median(layers):.1f} times the mean (median), {max(layers):.1f} at most."
    )
