"""Trains four LoRA adapters of the bundled tiny model, each on the part of its text that is about one thing.

    GOMP_SPINCOUNT=0 python train_adapters.py --steps 80   # ../tiny-adapters: half a minute each

They are as small as adapters can be, rank 2 on queries and values, and stored in float16. They exist so that several
adapters on one server can be tried, tested and planted as a fault (docs/lora.md, docs/faults.md). PEFT writes them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
ADAPTERS = HERE.parent / "tiny-adapters"
# The folder of each adapter, and the words of which its paragraphs have one.
TOPICS = {
    "files": ("file", "directory", "path"),
    "numbers": ("number", "float", "integer", "matrix"),
    "network": ("server", "request", "socket", "connection"),
    "tests": ("test", "error", "exception", "raise"),
}
RANK, MODULES = 2, ["q_proj", "v_proj"]
WINDOW, NUM_WINDOWS = 128, 8
LEARNING_RATE = 5e-3
END_OF_TEXT = 0


def token_windows(words: tuple[str, ...], tokenizer: Tokenizer) -> torch.Tensor:
    """The paragraphs that have one of the words [windows, WINDOW]."""
    paragraphs = (HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
    chosen = [each for each in paragraphs if any(word in each.lower() for word in words)]
    ids = [id for each in chosen for id in (*tokenizer.encode(each).ids, END_OF_TEXT)]
    return torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def train(name: str, steps: int) -> None:
    torch.manual_seed(20261123)
    dice = random.Random(name)
    windows = token_windows(TOPICS[name], Tokenizer.from_file(str(HERE / "tokenizer.json")))
    base = Qwen3ForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES, task_type="CAUSAL_LM"))
    optimiser = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE, weight_decay=0
    )
    begin, losses = time.monotonic(), []
    for step in range(steps):
        batch = windows[dice.sample(range(len(windows)), NUM_WINDOWS)]
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / steps)
        optimiser.step()
        losses.append(loss.item())
    write(model, name)
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    print(
        f"{name}: {len(windows)} windows, loss {first:.2f} → {last:.2f}, {time.monotonic() - begin:.0f} s", flush=True
    )


def write(model: torch.nn.Module, name: str) -> None:
    """PEFT's two files, without the path of this machine that it notes as the base model."""
    folder = ADAPTERS / name
    model.half().save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = folder / "adapter_config.json"
    described = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": "tiny-model"}
    config.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in TOPICS:
        train(name, arguments.steps)


if __name__ == "__main__":
    main()
