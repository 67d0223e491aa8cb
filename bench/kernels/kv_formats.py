"""What the formats of keys and values cost and give on a CPU: accuracy, size, and the time of decode attention.

    python -m bench.kernels.kv_formats [--model FOLDER]

Accuracy: the same text is scored with each format, and continued greedily. Speed: formats in turns, each call on
another cache, of more memory than the processor's caches hold.
"""

import argparse
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.kernels.cpu_kernels import ROTATED_BYTES, SHAPES, Shape, in_turns, make_inputs
from sojourn.engine.compute.attention.backend import AttentionSpec
from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.cpp.extension import library, unavailable
from sojourn.engine.compute.kv_cache import KVLayout, LayerCache, allocate
from sojourn.engine.compute.kv_formats import QUANTISED, vector_bytes
from sojourn.engine.config import model_folder
from sojourn.engine.llm import LLM
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.errors import SojournError

TEXTS, TEXT_TOKENS, CONTINUED = 8, 700, 64
DECODES = ((8, 4096), (1, 4096), (32, 256))  # sequences and context of each


def texts(model: Path) -> list[list[int]]:
    """Pieces of the prompts of the bundled model, which are English and code, as the model's tokenizer has them."""
    from sojourn.engine.token.text.tokenizer import Tokenizer

    ids = Tokenizer(model).encode((model_folder("tiny-model") / "prompts.txt").read_text("utf-8"))
    return [ids[begin : begin + TEXT_TOKENS] for begin in range(0, TEXTS * TEXT_TOKENS, TEXT_TOKENS)]


def scored(model: Path, pieces: list[list[int]], kv_cache_dtype: str) -> tuple[torch.Tensor, list[list[int]]]:
    """Log-probabilities of all tokens, and greedy continuations of the beginnings."""
    with LLM(str(model), kv_cache_dtype=kv_cache_dtype, telemetry="off") as llm:
        scores = llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0))
        found = [token.logprob for one in scores for token in one.prompt_logprobs if token is not None]
        greedy = SamplingParams(max_tokens=CONTINUED, temperature=0, ignore_eos=True)
        answers = llm.generate([piece[: TEXT_TOKENS // 2] for piece in pieces], greedy)
        return torch.tensor(found), [one.token_ids for one in answers]


def accuracy(model: Path) -> Table:
    pieces = texts(model)
    exact, greedy = scored(model, pieces, "auto")
    table = Table(
        "kv_cache_dtype", "nats per token", "change: mean", "99%", "largest", "same greedy tokens", "until a change"
    )
    for name in QUANTISED:
        found, answers = scored(model, pieces, name)
        change = (found - exact).abs()
        pairs = [list(map(int.__eq__, a, b)) for a, b in zip(answers, greedy, strict=True)]
        same = sum(map(sum, pairs)) / sum(map(len, pairs))
        until = [row.index(False) if False in row else len(row) for row in pairs]
        table.add_row(
            name, f"{(exact - found).mean():+.4f}", f"{change.mean():.4f}", f"{change.quantile(0.99):.3f}",
            f"{change.max():.2f}", f"{same:.0%}", f"{sum(until) / len(until):.0f} of {CONTINUED}",
        )  # fmt: skip
    table.title = f"{model.name}: {len(exact)} tokens, mean log-probability {exact.mean():.3f}"
    return table


def decode_seconds(shape: Shape, sequences: int, context: int) -> dict[str, float]:
    """Of a layer, by format."""
    kernels = library()
    if kernels is None:
        raise SojournError(f"there are no C++ kernels to measure: {unavailable()}")
    backend, calls = CppAttention(kernels), {}
    inputs, num_slots = make_inputs(context - 1, 1, sequences)
    backend.begin(inputs)
    query = torch.randn(sequences, shape.num_heads, shape.head_dim)
    spec = AttentionSpec(1 / math.sqrt(shape.head_dim), shape.head_dim)
    for name, dtype in {"float32": torch.float32, **QUANTISED}.items():
        num_bytes = 2 * num_slots * shape.num_kv_heads * vector_bytes(shape.head_dim, dtype)
        layers = max(2, ROTATED_BYTES // num_bytes)
        layout, blocks = KVLayout(2, shape.num_kv_heads, shape.head_dim), num_slots // inputs.block_size
        cache = allocate(layout, layers, blocks, inputs.block_size, dtype, torch.device("cpu"))
        if cache.scales is None:
            cache.values.normal_()
        else:
            cache.values.view(torch.uint8).random_(0, 112)
            cache.scales.fill_(0.01)

        def call(turn: int, caches: list[LayerCache] = cache.layers()) -> None:
            backend.attend(query, caches[turn % len(caches)], spec)

        calls[name] = call
    return in_turns(calls)


def speed() -> Table:
    table = Table("shape", "decodes", *(f"{name}" for name in ("float32", *QUANTISED)))
    for shape in SHAPES:
        for sequences, context in DECODES:
            found = decode_seconds(shape, sequences, context)
            shown = [f"{1e6 * took:,.0f} µs ({found['float32'] / took:.2f}x)" for took in found.values()]
            table.add_row(shape.name, f"{sequences} x {context:,}", *shown)
    table.title = f"decode attention of one layer, {torch.get_num_threads()} threads"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--accuracy", action="store_true", help="leaves the speed out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console(width=140)
    if not options.accuracy:
        with torch.inference_mode():
            console.print(speed())
    console.print(accuracy(model_folder(options.model)))


if __name__ == "__main__":
    main()
