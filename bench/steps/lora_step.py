"""Decode steps of sixteen requests, each with a LoRA adapter of its own, and of sixteen without, in turns.

python -m bench.steps.lora_step [MODEL] [--rank 16] [--weights auto,int8]
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from bench.shapes import model_to_bench
from sojourn.engine.techniques.lora.checkpoint.checkpoint import describe
from sojourn.engine.token.models.registry import outlined_model
from tests.engine.harness import drain, hand_over, make_engine, submit

SEQUENCES = 16
ROUNDS = 3
TOKENS = 40
PROMPT = 64


def write_adapters(base: Path, root: Path, rank: int, *, dummy: bool) -> dict[str, Path]:
    """Sixteen adapters with random matrices for every linear layer, in bfloat16."""
    model = outlined_model(base, torch.float32, torch.device("cpu"), None, dummy=dummy).model
    folders = {}
    for number in range(SEQUENCES):
        folder = folders[f"a{number}"] = root / f"a{number}"
        folder.mkdir()
        tensors = {}
        for name, part in model.parts().items():
            key = f"base_model.model.{name}"
            a, b = (rank, part.linear.in_features), (part.out_features, rank)
            tensors[f"{key}.lora_A.weight"] = (torch.randn(a) * 0.02).bfloat16()
            tensors[f"{key}.lora_B.weight"] = (torch.randn(b) * 0.02).bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folders


def measure(model: str, rank: int, weights: str) -> tuple[dict[str, float], float]:
    """Milliseconds of a decode step of each kind, and the ratio of their rates, paired by round.

    A round gives the first decile of its steps, which other work on the machine disturbs least; then medians.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, load_format = model_to_bench(model, Path(scratch))
        adapters = write_adapters(Path(folder), Path(scratch), rank, dummy=load_format == "dummy")
        references = [describe(path).named(name) for name, path in adapters.items()]
        engine, published = make_engine(
            folder, load_format=load_format, weights=weights, lora_adapters=adapters, max_loras=SEQUENCES, threads=0,
            num_kv_blocks=SEQUENCES * 16, max_model_len=256,
        )  # fmt: skip
        times: dict[str, list[float]] = {"none": [], "adapters": []}
        for turn in range(ROUNDS + 1):
            for kind, chosen in (("none", [None] * SEQUENCES), ("adapters", references)):
                first = len(published.records)
                requests = [submit(f"{kind}{turn}-{i}", [3 + i] * PROMPT, TOKENS) for i in range(SEQUENCES)]
                pairs = zip(requests, chosen, strict=True)
                hand_over(engine, [msgspec.structs.replace(each, adapter=adapter) for each, adapter in pairs])
                drain(engine)
                steps = [s for s in published.records[first:] if s.kinds == ["decode"] * SEQUENCES]
                if turn:  # the first is not counted
                    times[kind].append(statistics.quantiles([(s.end_ns - s.begin_ns) / 1e6 for s in steps], n=10)[0])
    ratios = [none / lora for none, lora in zip(times["none"], times["adapters"], strict=True)]
    return {kind: statistics.median(values) for kind, values in times.items()}, statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="small")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--weights", default="float32,auto,int8", help="settings `weights`, with commas")
    options = parser.parse_args()
    for weights in options.weights.split(","):
        found, ratio = measure(options.model, options.rank, weights)
        print(f"{weights:8} {found['none']:6.2f} ms a step without, {found['adapters']:6.2f} ms with 16 adapters of "
              f"rank {options.rank}: {ratio:.2f} of the tokens/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
