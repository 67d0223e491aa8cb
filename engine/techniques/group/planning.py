"""A parallel group around the loop: what its ranks report of each step."""

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.technique import Technique
from sojourn.metrics.records import ACTIVITIES, StepRecord
from sojourn.metrics.records.step import Group


class GroupPlanning(Technique):
    name = "group"

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        report = outcome.parts.get(self.name)
        if report is None:
            return
        num_ranks = 1 + max(rank for rank, *_ in report.ranks)
        sums = [[0] * num_ranks for _ in ACTIVITIES]
        for rank, *times in report.ranks:
            for ranks, ns in zip(sums, times, strict=True):
                ranks[rank] += ns
        busy, communication, bubble = sums
        record.group = Group(
            communication_ns=outcome.communication_ns,
            bubble_ns=outcome.bubble_ns,
            exchanged_bytes={name: num_bytes for name, (num_bytes, _) in report.exchanges.items()},
            exchange_ns={name: ns for name, (_, ns) in report.exchanges.items()},
            exchange_hidden_ns=report.hidden_ns,
            rank_busy_ns=busy,
            rank_communication_ns=communication,
            rank_bubble_ns=bubble,
        )
