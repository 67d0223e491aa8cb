"""What a live request reads, computes again and computes for the first time, in the shadow index."""

from dataclasses import dataclass, field

from sojourn.engine.memory.shadow.index import ShadowNode


@dataclass(slots=True)
class RequestPath:
    """The blocks of a live request in the shadow index."""

    root: ShadowNode
    read: list[ShadowNode | None]  # its first full blocks, which it reads; None behind its window
    known: list[ShadowNode] = field(
        default_factory=list
    )  # its full blocks, those too that it computes again: the pool lost them
    prompt_keys: list[bytes] = field(default_factory=list)  # of all its full blocks, while it computes them
    prompt: bytes = b""  # its entry in the live prompts; empty of a fork, whose leader has it
    partly_lost: bool = False  # a smaller pool would have lost some of `read`, until its next block is filled

    @property
    def last(self) -> ShadowNode:
        """Of the blocks that it reads. A window leaves the last one in."""
        last = self.read[-1] if self.read else self.root
        assert last is not None, "the last full block is read"
        return last
