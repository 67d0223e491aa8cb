"""A rank beside the first, once torch is loaded: its shard of the model, and the steps that it computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from sojourn.engine.config import EngineConfig
from sojourn.engine.runner.build import chosen_device
from sojourn.engine.runner.technique import ComputingTechnique
from sojourn.engine.techniques.group import messages
from sojourn.engine.techniques.group.follower import Follower
from sojourn.engine.techniques.group.identity import identity
from sojourn.engine.techniques.group.layout import layout_of, threads_of, timeout_seconds
from sojourn.engine.techniques.group.rank_step import BetweenSteps, Conclude, RankReport, RankStep
from sojourn.engine.techniques.group.runner import rank_runner
from sojourn.engine.techniques.group.torch_distributed import connect
from sojourn.metrics.compute.startup import StartupClock


class Mailbox(Protocol):
    def say(self, message: messages.FromRank) -> None: ...
    def expect(self, kind: type[messages.ToRank]) -> messages.ToRank: ...


class Member:
    """Owns the rank's device. Implements engine.techniques.group.rank_step.Ranks for its own runner."""

    def __init__(
        self, config: EngineConfig, folder: Path, rank: int, mailbox: Mailbox, sockets: Path,
        techniques: Sequence[ComputingTechnique],
    ):  # fmt: skip
        """Waits for rank 0 until all ranks are there, then loads the model. Raises ModelError with a sentence."""
        self.layout = layout_of(config, rank)
        self._mailbox = mailbox
        torch.set_num_threads(threads_of(config))
        device = chosen_device(config)
        if device.type == "cuda":
            torch.cuda.set_device(rank)
        mailbox.say(messages.Hello(rank, identity(config, folder)))
        mailbox.expect(messages.Welcome)
        self.communicators = connect(self.layout, device, sockets, timeout_seconds(config))
        self.runner, stages = rank_runner(config, folder, StartupClock(), techniques, self)
        self._follower = Follower(self.runner, stages)

    def agree(self, num_blocks: int) -> int:
        self._mailbox.say(messages.Planned(self.layout.rank, num_blocks))
        return self._mailbox.expect(messages.Agreed).num_blocks

    def expect(self, step: RankStep) -> None:
        """Called by the thread that hears of steps, before `follow`."""
        self._follower.expect(step)

    def follow(self, work: RankStep | Conclude | BetweenSteps) -> RankReport | None:
        return self._follower.follow(work)

    def send(self, work: RankStep | BetweenSteps) -> None:
        raise AssertionError("rank 0 alone plans")

    def conclude(self) -> None:
        raise AssertionError("rank 0 alone plans")

    def loss(self) -> None:
        """Rank 0 alone watches the others."""

    def take_reports(self) -> Sequence[RankReport]:
        return ()

    def close(self) -> None:
        self.communicators.close()
