"""What the exchanges of a parallel group cost: calls and bytes of a step, their time over measured links, and bubbles.

The exchanges are those of rank 0, as a step record has them. Bytes count the whole tensor of each exchange.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sojourn.metrics.compute.cost_model import Count, ModelShape, shape_from
from sojourn.metrics.compute.link import POINT_TO_POINT, Link

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
WAITS = ("recv",)  # for another stage: a bubble; all others are communication


class Exchanged(NamedTuple):
    calls: Count
    bytes: Count


class GroupShape(msgspec.Struct, frozen=True):
    """How a model is spread over ranks, and the widths of what they exchange. Layers are those of rank 0's stage."""

    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: int
    num_layers: int
    num_mixtures: int  # layers with routed experts
    hidden_size: int
    vocab_size: int
    item_bytes: int  # of an activation
    num_chosen: float = 0.0  # experts of a token in a mixture, on whichever rank
    divides_tokens: bool = (
        False  # tokens travel to the ranks of their experts; else the ranks sum what all of them give
    )

    @property
    def num_ranks(self) -> int:
        return self.pipeline_parallel * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def sums_per_step(self) -> int:
        """All-reduces of the residual stream: of the embedding, behind attention and behind feed-forward parts."""
        if self.tensor_parallel > 1:
            return 1 + 2 * self.num_layers
        return self.num_mixtures if self.expert_parallel > 1 and not self.divides_tokens else 0

    def exchanges(self, tokens: Count, logit_rows: Count) -> dict[str, Exchanged]:
        """By collective, of a step with so many tokens, or of several steps: arrays [steps]."""
        found, row_bytes = {}, self.hidden_size * self.item_bytes
        if sums := self.sums_per_step:
            found["all_reduce"] = Exchanged(sums + 0 * tokens, sums * tokens * row_bytes)
        if self.tensor_parallel > 1:  # each rank gives as many columns of the logits, the last one with padding
            columns = self.tensor_parallel * -(-self.vocab_size // self.tensor_parallel)
            found["all_gather"] = Exchanged(1 + 0 * logit_rows, logit_rows * columns * self.item_bytes)
        if self.pipeline_parallel > 1:
            found["send"] = Exchanged(1 + 0 * tokens, tokens * row_bytes)
            found["recv"] = Exchanged(np.minimum(logit_rows, 1), logit_rows * row_bytes)
        if self.divides_tokens:
            found |= self._travel(tokens)
        return found

    def _travel(self, tokens: Count) -> dict[str, Exchanged]:
        """Of tokens that choose experts evenly: their numbers by rank, the way there and the way back, and all parts.
        Each travels with the weights and numbers of its experts, once to every rank that holds one of them."""
        ranks, row_bytes = self.ranks_per_stage, self.hidden_size * self.item_bytes
        share = -(-tokens // ranks)
        reached = 1 - (1 - 1 / ranks) ** self.num_chosen  # the part of all tokens that a rank gets
        there = np.minimum(share, tokens) * ranks * reached * (row_bytes + 8 * self.num_chosen)
        one_mixture = 8 * ranks + there + tokens * reached * row_bytes
        return {
            "all_to_all": Exchanged(3 * self.num_mixtures + 0 * tokens, self.num_mixtures * one_mixture),
            "all_gather": Exchanged(self.num_mixtures + 0 * tokens, self.num_mixtures * ranks * share * row_bytes),
        }


def group_shape(
    shape: ModelShape, sizes: Mapping[str, Any], dtype: str, *, is_of_rank: bool = True
) -> GroupShape | None:
    """`sizes`: the settings of the group; None where they make one rank. `is_of_rank`: the shape's layers are those
    of one stage already."""
    tensor, pipeline, expert = (
        int(sizes.get(name) or 1) for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel")
    )
    if tensor * pipeline * expert == 1:
        return None
    stages, experts = 1 if is_of_rank else pipeline, shape.experts
    mixtures, chosen = (0, 0.0) if experts is None else (experts.num_layers, experts.num_chosen)
    return GroupShape(
        tensor, pipeline, expert, -(-shape.num_layers // stages), -(-mixtures // stages), shape.hidden_size,
        shape.vocab_size, ITEM_BYTES[dtype], chosen * (expert if is_of_rank else 1),
        mixtures > 0 and sizes.get("expert_exchange") == "all-to-all",
    )  # fmt: skip


def group_shape_from(meta: Mapping[str, Any]) -> GroupShape | None:
    """Of a `run.json`; None where its server was one process, or none of ours. Raises msgspec.ValidationError."""
    shape, core = shape_from(meta), meta.get("core") or {}
    if shape is None or core.get("dtype") not in ITEM_BYTES:
        return None
    sizes = (meta.get("engine") or {}) | {"expert_exchange": core.get("expert_exchange")}
    return group_shape(shape, sizes, core["dtype"])


def cheaper_exchange(group: GroupShape, links: Sequence[Link], steps: Sequence[int]) -> str:
    """What ranks with experts should exchange: all-to-all where the links need less time for it in steps of each of
    these numbers of tokens, else all-reduce, also where the links were not measured."""
    tokens, rows = np.array(steps), np.zeros(len(steps), dtype=np.int64)
    sums, travel = (
        predicted(msgspec.structs.replace(group, divides_tokens=divides), links, tokens, rows, np.zeros(len(steps)))
        for divides in (False, True)
    )
    if sums is None or travel is None:
        return "all-reduce"
    return "all-to-all" if np.all(travel.exchange_ns < sums.exchange_ns) else "all-reduce"


class Communication(NamedTuple):
    """Of one step, or of several: nanoseconds [steps]."""

    exchange_ns: float | np.ndarray  # the links' time
    wait_ns: float | np.ndarray  # for the ranks that come later, who had as much work


def predicted(
    group: GroupShape, links: Sequence[Link], tokens: Count, logit_rows: Count, busy_ns: float | np.ndarray
) -> Communication | None:
    """What `compute.communication` should be, of steps whose work takes a rank `busy_ns`; None without the links.

    Links are measured between two ranks. A ring of n ranks sends 2 (n - 1) / n of the bytes in as many more turns
    (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), so that more ranks are extrapolated.
    """
    by_name = {link.collective: link for link in links}
    exchanges = {name: each for name, each in group.exchanges(tokens, logit_rows).items() if name not in WAITS}
    if any(name not in by_name for name in exchanges if name != POINT_TO_POINT):
        return None
    total = 0.0 * busy_ns
    for name, (calls, num_bytes) in exchanges.items():
        if name == POINT_TO_POINT:
            continue  # it returns at once, and the stage goes on
        link, others = by_name[name], group.ranks_per_stage - 1
        total = total + link.latency_ns * calls * others
        total = total + 1e9 * num_bytes / link.bytes_per_s * 2 * others / group.ranks_per_stage
    share = max((by_name[name].wait_share for name in exchanges if name in by_name), default=0.0)
    return Communication(total, share * busy_ns)


class Bubbles(NamedTuple):
    """Of a pipeline in which as many steps are under way as it has stages."""

    period_ns: float  # from one step to the next
    shares: list[float]  # by stage: of the time in which it computes or waits, waiting for another one


def bubbles(stage_ns: Sequence[float], host_ns: float, transfer_ns: float, under_way: int) -> Bubbles:
    """`stage_ns`: what a step takes each stage; `host_ns`: between two steps on the first; `transfer_ns`: from stage to
    stage, which other steps hide. The slowest stage sets the pace, or a step's way through all stages where few steps
    are under way. What the host does between two steps is no bubble of the first stage."""
    first, *others = stage_ns
    way = sum(stage_ns) + host_ns + len(stage_ns) * transfer_ns
    period = max(first + host_ns, *others, way / max(1, under_way))
    waits = [period - host_ns - first, *(period - each for each in others)]
    shares = [wait / max(wait + each, 1e-9) for wait, each in zip(waits, stage_ns, strict=True)]
    return Bubbles(period, shares)
