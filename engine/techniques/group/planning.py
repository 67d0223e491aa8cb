"""A parallel group around the loop: what its ranks report of each step."""

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.technique import Technique
from sojourn.metrics.records import ACTIVITIES, StepRecord


class GroupPlanning(Technique):
    name = "group"

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        if not outcome.ranks:
            return
        record.communication_ns, record.bubble_ns = outcome.communication_ns, outcome.bubble_ns
        for name, (num_bytes, ns) in outcome.exchanges.items():
            record.exchanged_bytes[name], record.exchange_ns[name] = num_bytes, ns
        record.exchange_hidden_ns = outcome.hidden
        num_ranks = 1 + max(rank for rank, *_ in outcome.ranks)
        sums = [[0] * num_ranks for _ in ACTIVITIES]
        for rank, *times in outcome.ranks:
            for ranks, ns in zip(sums, times, strict=True):
                ranks[rank] += ns
        record.rank_busy_ns, record.rank_communication_ns, record.rank_bubble_ns = sums
