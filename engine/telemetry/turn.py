"""One turn of the engine's loop as its clock saw it."""

from dataclasses import dataclass


@dataclass(slots=True)
class Turn:
    """Clock readings in nanoseconds. Each but the first ends a stage, in the order of metrics.records.STAGES."""

    begin_ns: int
    received_ns: int
    planned_ns: int = 0
    prepared_ns: int = 0
    launched_ns: int = 0
    waited_ns: int = 0
    sampled_ns: int = 0
    committed_ns: int = 0
    end_ns: int = 0

    def stages(self) -> list[int]:
        """Nanoseconds of each stage of a turn that committed a step; they sum to the turn."""
        return [
            self.received_ns - self.begin_ns,
            self.planned_ns - self.received_ns,
            self.prepared_ns - self.planned_ns,
            self.launched_ns - self.prepared_ns,
            self.waited_ns - self.launched_ns,
            self.sampled_ns - self.waited_ns,
            self.committed_ns - self.sampled_ns,
            self.end_ns - self.committed_ns,
        ]

    def end_without_step(self) -> None:
        """No step was read: the stages behind `launch` are empty."""
        self.waited_ns = self.sampled_ns = self.committed_ns = self.end_ns = self.launched_ns
