"""What a weight format costs and what it gives: time of one product, error of one product, error of a whole model.

    python -m bench.kernels.linear [CHECKPOINT] [--quick] [--processor-time]

prints all three for the bundled model, or for another checkpoint; `measure` gives the times to `sojourn dev bench
kernels`. Every product reads weights that no cache holds, and formats take turns, so that a busy machine slows all of
them. The processor time of one thread depends less on what else runs.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from bench.results import Row
from sojourn.engine.compute.cpp.extension import Library, library
from sojourn.engine.compute.cpp.matrices import groups_kernel
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.quantisation import cpu_groups
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.engine.compute.quantisation.rounding import GROUP, round_to_nearest
from sojourn.engine.compute.weight_formats import cpp_formats, torch_formats
from sojourn.engine.config import model_folder
from sojourn.engine.llm import LLM
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.compute.roofline import Ceilings, load_ceilings
from sojourn.metrics.errors import CalibrationError

SIZES = ((1024, 512), (3072, 512), (512, 1536), (2048, 2048))  # outputs and inputs: a small model's, and a larger layer
ROWS = (1, 8, 32, 64, 512)
ROTATED_BYTES = 128 << 20  # of the largest format: more than the caches of this size of machine
REPEATS = 15
# Of a weight. Groups have a scale of 2 bytes, and where they are asymmetric a zero of 2.
BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 0.5 + 2 / GROUP, "int4:128": 0.5 + 2 / 128,
    "int4:128z": 0.5 + 4 / 128, "int8:32": 1 + 2 / 32,
}  # fmt: skip
INTEGERS = ("int8", "int4")  # formats whose products are of int8

Product = Callable[[torch.Tensor], torch.Tensor]


def products() -> dict[str, Callable[[torch.Tensor], Product]]:
    """Name → makes a product out of a weight: torch's plain one, torch's packed ones, and ours."""
    packed = {f"torch {name}": form.pack for name, form in torch_formats().items()}
    if (kernels := library()) is not None:
        packed |= {f"ours {name}": form.pack for name, form in cpp_formats(kernels).items()}
        packed |= group_formats(kernels)
    callables = {"torch unpacked": lambda weight: lambda x: F.linear(x, weight)}
    return callables | {name: lambda weight, pack=pack: pack(weight, None).apply for name, pack in packed.items()}


def group_formats(kernels: Library) -> dict[str, Callable[..., Product]]:
    """Forms of quantised checkpoints that `weights` does not make: bits, group, and z for asymmetric groups."""
    if (kernel := groups_kernel(kernels)) is None:
        return {}

    def pack(group: int, bits: int, zeros: bool, weight: torch.Tensor, bias: torch.Tensor | None) -> LinearMethod:
        matrix = round_to_nearest(weight, group, bits)
        if zeros:  # a table of them, which changes next to nothing but the time
            table = torch.arange(matrix.scales.numel()).remainder(2).view_as(matrix.scales) / 1024
            matrix = replace(matrix, zeros=table)
        return cpu_groups.pack(kernel, matrix, bias)

    forms = {"int4:128": (128, 4, False), "int4:128z": (128, 4, True), "int8:32": (32, 8, False)}
    return {f"ours {name}": partial(pack, *form) for name, form in forms.items()}


def times(
    outputs: int, inputs: int, repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> dict[tuple[str, int], float]:
    """(format, rows) → median seconds of one product."""
    copies = max(3, ROTATED_BYTES // (4 * outputs * inputs))
    weight = torch.randn(outputs, inputs).mul_(0.02)
    callables = {name: [make(weight.clone()) for _ in range(copies)] for name, make in products().items()}
    durations, turn = {}, 0
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        for repeat in range(repeats + 2):
            for name, weights in callables.items():
                begin = clock()
                weights[turn % copies](x)
                if repeat >= 2:
                    durations.setdefault((name, rows), []).append(clock() - begin)
            turn += 1
    return {key: statistics.median(seconds) for key, seconds in durations.items()}


def measure() -> list[Row]:
    """One row for each format, size and number of rows."""
    try:
        ceilings = load_ceilings()
    except CalibrationError:
        ceilings = None
    with torch.inference_mode():
        return [
            _row(name, rows, outputs, inputs, seconds, ceilings)
            for outputs, inputs in SIZES
            for (name, rows), seconds in times(outputs, inputs).items()
        ]


def _row(name: str, rows: int, outputs: int, inputs: int, seconds: float, ceilings: Ceilings | None) -> Row:
    flops, precision = 2 * rows * outputs * inputs, name.split()[1].replace("unpacked", "float32")
    # Wide weights are narrow ones that became float32 in a register: the arithmetic is that of float32.
    arithmetic = "int8" if precision.startswith(INTEGERS) else "float32"
    limit = None
    if ceilings is not None and arithmetic in ceilings.precisions:
        moved = BYTES[precision] * outputs * inputs + 4 * rows * (outputs + inputs)
        limit = 100 * ceilings.roofline_ns(flops, moved, arithmetic) / (seconds * 1e9)
    case = f"{rows} rows, {inputs} to {outputs}"
    return Row(f"linear, {name}", case, seconds * 1e6, flops / seconds / 1e9, "GFLOP/s", limit)


def layer_errors(folder: Path) -> dict[str, list[float]]:
    """Format → relative error of each linear layer's product, of rows as a norm leaves them, against float32."""
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(0)
    model = load_model(folder, torch.float32, cpu, None)
    found: dict[str, list[float]] = {}
    for layer in model.modules():
        if isinstance(layer, Linear):
            x = torch.randn(32, layer.in_features, generator=generator)
            exact = F.linear(x.double(), layer.weight.double())
            for name, make in products().items():
                error = (make(layer.weight)(x) - exact).norm() / exact.norm()
                found.setdefault(name, []).append(error.item())
    return found


def model_errors(folder: Path, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Setting → what it changes in the log-probability of each token of a prompt, against weights=float32."""

    def logprobs(weights: str) -> torch.Tensor:
        with LLM(folder, device="cpu", weights=weights, max_num_seqs=1) as llm:
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            completion = llm.generate([prompt], params)[0]
        return torch.tensor([entry.logprob for entry in completion.prompt_logprobs if entry is not None])

    exact = logprobs("float32")
    return {weights: logprobs(weights) - exact for weights in ("auto", "float16", "int8", "int4")}


def some_text(folder: Path, length: int = 400) -> list[int]:
    """Tokens of English prose, as the checkpoint's tokenizer has them."""
    text = (model_folder("tiny-model") / "prompts.txt").read_text(encoding="utf-8")
    return Tokenizer(folder).encode(text[:20_000])[:length]


def main() -> None:
    quick, clock = "--quick" in sys.argv, time.perf_counter
    if "--processor-time" in sys.argv:
        torch.set_num_threads(1)
        clock = time.thread_time
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    folder, out = model_folder(names[0] if names else "tiny-model"), Console(width=120)
    if not quick:
        for outputs, inputs in SIZES:
            table = Table(f"ms, {inputs} to {outputs}; rows", *map(str, ROWS))
            with torch.inference_mode():
                medians = times(outputs, inputs, clock=clock)
            for name in dict.fromkeys(name for name, _ in medians):
                table.add_row(name, *(f"{medians[name, rows] * 1e3:.3f}" for rows in ROWS))
            out.print(table)
    table = Table("relative error of a layer", "median", "largest")
    with torch.inference_mode():
        for name, errors in layer_errors(folder).items():
            table.add_row(name, f"{statistics.median(errors):.1e}", f"{max(errors):.1e}")
    out.print(table)
    table = Table(f"log-probabilities of {folder.name}", "mean error", "99%", "largest", "perplexity")
    for weights, change in model_errors(folder, some_text(folder)).items():
        sizes, perplexity = change.abs(), (-change.mean()).exp() - 1
        high = (sizes.mean(), sizes.quantile(0.99), sizes.max())
        table.add_row(f"weights={weights}", *(f"{value:.1e}" for value in high), f"{perplexity:+.2%}")
    out.print(table)


if __name__ == "__main__":
    main()
