"""Time to the first token of a long prompt: its prefix from the disk tier, from host memory, or computed again.

python -m bench.kv_tiers [--model 100m] [--tokens 4000] [--repeats 3] [--dir FOLDER]

Prompts are stored by one engine. A second one, over the same folder, then gets in turns a prompt that is on disk with
its files in the page cache, one whose files the page cache was asked to drop, the same one again from host memory, and
a prompt that nobody has seen. Each ends after one token.
"""

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.shapes import model_to_bench, vocab_size
from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.loop.engine import Engine
from sojourn.engine.sampling import SamplingParams

WAYS = ("computed", "disk, page cache", "disk, no page cache", "host")


class Caller:
    """Hands one prompt at a time to an engine, and notes what it published of it."""

    def __init__(self, config: EngineConfig):
        self.first_ns, self.ended = 0, None
        self.engine: Engine
        self.engine, _ = build(config, 0, self._take)

    def ttft_s(self, request_id: str, prompt: list[int]) -> float:
        begin_ns = time.monotonic_ns()
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.ended = None
        self.engine.receive([messages.Submit(request_id, prompt, sampling, encoded_ns=begin_ns)], begin_ns)
        while self.ended is None:
            if self.engine.has_work:
                self.engine.receive([], self.engine.step())
            else:
                time.sleep(0.001)  # as the core's loop looks
                self.engine.receive([], time.monotonic_ns())
        return (self.first_ns - begin_ns) / 1e9

    def settle(self) -> None:
        """Until all stores are written."""
        tiers = self.engine.scheduler.technique("tiers").tiers
        assert tiers is not None
        self.engine.flush()
        while any(tier.num_writing or tier.backlog for tier in tiers.slow):
            time.sleep(0.01)
            self.engine.flush()

    def _take(self, message: messages.Tokens | messages.Observed) -> None:
        if isinstance(message, messages.Tokens) and message.outputs:
            self.first_ns = time.monotonic_ns()
        if isinstance(message, messages.Observed) and message.ended:
            self.ended = message.ended[0]


def drop_page_cache(folder: Path) -> None:
    """Asks the system to forget the contents of all files, once they are on the disk."""
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main(
    model: Annotated[str, typer.Option(help="a checkpoint folder, or a shape of bench/shapes.py")] = "100m",
    tokens: Annotated[int, typer.Option(help="of each prompt")] = 4000,
    repeats: Annotated[int, typer.Option(help="of each way")] = 3,
    folder: Annotated[Path | None, typer.Option("--dir", help="where the disk tier lies")] = None,
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path, load_format = model_to_bench(model, Path(scratch))
        random.seed(1)
        vocabulary = vocab_size(path)
        prompts = [[random.randrange(vocabulary) for _ in range(tokens)] for _ in range(3 * repeats + 1)]
        length = tokens + 16
        config = EngineConfig(
            model=path, load_format=load_format, max_model_len=length, max_num_seqs=1,
            num_kv_blocks=2 * -(-length // 16), kv_disk_path=Path(scratch) / "kv", kv_host_gib=1.0,
        )  # fmt: skip
        writer = Caller(config)
        for index, prompt in enumerate(prompts[: 2 * repeats]):
            writer.ttft_s(f"store {index}", prompt)
            writer.settle()
        writer.engine.close()
        del writer
        reader = Caller(config)
        reader.ttft_s("warm up", prompts[-1])
        reader.settle()
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for index in range(repeats):
            times["computed"].append(reader.ttft_s(f"computed {index}", prompts[2 * repeats + index]))
            reader.settle()
            times["disk, page cache"].append(reader.ttft_s(f"cached {index}", prompts[index]))
            assert reader.ended.kv_load.loaded_tokens.get("disk", 0) > 0.9 * tokens, reader.ended.kv_load
            drop_page_cache(Path(scratch) / "kv")
            times["disk, no page cache"].append(reader.ttft_s(f"cold {index}", prompts[repeats + index]))
            assert reader.ended.kv_load.loaded_tokens.get("disk", 0) > 0.9 * tokens, reader.ended.kv_load
            reader.ttft_s(f"other {index}", prompts[-1])  # which takes the device's blocks
            times["host"].append(reader.ttft_s(f"host {index}", prompts[index]))
        block_bytes = reader.engine.scheduler.technique("tiers").tiers.block_bytes
        reader.engine.close()
    nbytes = block_bytes * (tokens // 16)
    table = Table(title=f"{model}: {tokens:,} prompt tokens, {nbytes / 1e6:.0f} MB of KV; time to the first token")
    for column in ("prefix", "median (s)", "all (s)", "computed ÷ this"):
        table.add_column(column, justify="left" if column == "prefix" else "right")
    computed = statistics.median(times["computed"])
    for way, found in times.items():
        middle = statistics.median(found)
        each = " ".join(f"{seconds:.3f}" for seconds in found)
        table.add_row(way, f"{middle:.3f}", each, f"{computed / middle:.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
