"""Tiny LoRA adapters as PEFT writes them, and base models with them merged: the oracle."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.techniques.lora.checkpoint.checkpoint import describe

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """An adapter with random matrices, B included, saved by PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(_base(base), LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": LINEARS} | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def random_adapter(base: Path, folder: Path, rank: int, seed: int = 0, targets: Sequence[str] = LINEARS) -> Path:
    """The same without PEFT, which takes seconds to import, for tests that read what it writes elsewhere."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for shard in sorted(base.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for key in sorted(file.keys()):
                module = key.removesuffix(".weight")
                if module.split(".")[-1] in targets and key != module:
                    outputs, inputs = file.get_slice(key).get_shape()
                    for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                        matrix = torch.empty(shape).normal_(0.0, 0.2, generator=generator)
                        tensors[f"base_model.model.{module}.lora_{side}.weight"] = matrix
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The base model with the adapter in its weights, by PEFT."""
    from peft import PeftModel

    PeftModel.from_pretrained(_base(base), adapter).merge_and_unload().save_pretrained(folder)
    return folder


def reference(folder: Path, name: str | None = None) -> AdapterReference:
    return describe(folder).named(name or folder.name)


def _base(folder: Path):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)
