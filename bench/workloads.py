"""What the benchmarks ask for: prompts as token ids, and how many tokens each shall give."""

import random
from dataclasses import dataclass, replace

VOCABULARY = 8000  # ids below it
FIRST_ID = 300  # those before it are often special


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at the beginning. Ends of text are ignored: the lengths are exact."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.0
    streams: int | None = None  # requests at a time; None: all

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True))

    def blocks(self, block_size: int) -> int:
        """KV blocks that all of its sequences take together: with so many, nothing is preempted."""
        pairs = zip(self.prompts, self.output_lens, strict=True)
        return sum(-(-(len(prompt) + length) // block_size) for prompt, length in pairs)

    def reworded(self, seed: int) -> "Workload":
        """The same lengths with other ids: no prefix cache has seen them. Seed 0 is the workload itself."""
        if seed == 0:
            return self
        dice = random.Random(seed)
        other = {token: dice.randrange(FIRST_ID, VOCABULARY) for prompt in self.prompts for token in prompt}
        return replace(self, prompts=[[other[token] for token in prompt] for prompt in self.prompts])

    def within(self, vocab_size: int) -> "Workload":
        """With ids that a model of `vocab_size` has: greater ones wrap around, the first 300 stay out where they can.
        What the model has already stays as it is."""
        if max(map(max, self.prompts)) < vocab_size:
            return self
        first = FIRST_ID if vocab_size > 2 * FIRST_ID else 0

        def wrapped(token: int) -> int:
            return token if token < vocab_size else first + (token - first) % (vocab_size - first)

        return replace(self, prompts=[[wrapped(token) for token in prompt] for prompt in self.prompts])


def nano_vllm() -> Workload:
    """The 256 sequences of nano-vllm's bench.py (GeeeekExplorer/nano-vllm), which small engines compare by."""
    dice = random.Random(0)
    prompts = [[dice.randint(0, 10_000) for _ in range(dice.randint(100, 1024))] for _ in range(256)]
    return Workload("nano-vllm", prompts, [dice.randint(100, 1024) for _ in range(256)], temperature=0.6)


def cpu_sized() -> Workload:
    """64 sequences that a CPU is done with in seconds: 32 to 256 tokens in, 32 to 128 out."""
    return _sequences("cpu", random.Random(0), 64, (32, 256), (32, 128))


def edit() -> Workload:
    """A text that repeats, as the edit of a file does: half of a passage that the prompt has twice. One at a time."""
    dice = random.Random(0)
    passages = [[dice.randrange(FIRST_ID, VOCABULARY) for _ in range(96)] for _ in range(3)]
    prompts = [passage * 2 + passage[:48] for passage in passages]
    return Workload("edit", prompts, [128] * 3, streams=1)


def prose() -> Workload:
    """A text that does not repeat: sampled, so that the model cannot run in a circle. One at a time."""
    return replace(_sequences("prose", random.Random(0), 3, (96, 96), (128, 128)), temperature=1.0, streams=1)


def streams(count: int, input_len: int, output_len: int, seed: int, vocabulary: int = VOCABULARY) -> Workload:
    """`count` requests of one length. Another seed gives other prompts, so that no cache can have seen them."""
    name, dice = f"{count} x {input_len} in, {output_len} out", random.Random(seed)
    return _sequences(name, dice, count, (input_len, input_len), (output_len, output_len), vocabulary)


def _sequences(
    name: str, dice: random.Random, count: int, inputs: tuple[int, int], outputs: tuple[int, int],
    vocabulary: int = VOCABULARY,
) -> Workload:  # fmt: skip
    prompts, output_lens = [], []
    for _ in range(count):
        prompts.append([dice.randrange(FIRST_ID, vocabulary) for _ in range(dice.randint(*inputs))])
        output_lens.append(dice.randint(*outputs))
    return Workload(name, prompts, output_lens)


WORKLOADS = {"nano-vllm": nano_vllm, "cpu": cpu_sized, "edit": edit, "prose": prose}
