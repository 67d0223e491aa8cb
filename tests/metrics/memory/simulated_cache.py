"""A prefix cache of blocks that evicts the one used last longest ago, as plainly as it can be written: an oracle."""

from random import Random

from sojourn.metrics.records import KvEventRecord

SECOND = 1_000_000_000


class SimulatedCache:
    """Looks chains of blocks up. A list in order of use; within a chain the last block is the first to go."""

    def __init__(self, size: float, unfinished: int = 0):
        """`unfinished` blocks are taken up by what each prompt has behind its last full block."""
        self.size, self.blocks = size - unfinished, []
        self.hits, self.hits_of, self.events = 0, [], []

    def look_up(self, chain: list[int], now_ns: int = 0, request: str | None = None) -> int:
        hit = 0
        while hit < len(chain) and chain[hit] in self.blocks:
            hit += 1
        held = set(self.blocks)
        new = [block for block in chain if block not in held]
        self.blocks = [block for block in self.blocks if block not in chain] + chain[::-1]
        removed = [self.blocks.pop(0) for _ in range(max(0, len(self.blocks) - int(min(self.size, 10**9))))]
        if removed:
            self.events.append(KvEventRecord(now_ns, "removed", removed, request=request))
        if new:
            at = chain.index(new[0])
            parent = chain[at - 1] if at else None
            self.events.append(KvEventRecord(now_ns, "stored", new, parent, 16, request=request))
        self.hits += hit
        self.hits_of.append(hit)
        return hit


def chains(seed: int, count: int = 300, prefixes: int = 12, longest: int = 6) -> list[list[int]]:
    """Prompts as chains of blocks: few beginnings, some of them often, and ends of their own or of earlier prompts."""
    dice = Random(seed)
    tree: dict[tuple[int, ...], int] = {}

    def block(path: tuple[int, ...]) -> int:
        return tree.setdefault(path, dice.getrandbits(64) - (1 << 63))

    made = []
    for _ in range(count):
        words = [min(int(dice.expovariate(0.3)), prefixes)]
        words += [dice.randrange(3) for _ in range(dice.randrange(longest))]
        if dice.random() < 0.4:
            words.append(1000 + dice.randrange(10**6))
        made.append([block(tuple(words[: end + 1])) for end in range(len(words))])
    return made
