"""transformers' continuous batching as a peer: the protocol of worker.py, run by any Python that has transformers.

It imports nothing of ours. {"model", "settings": {"device", "dtype", "load_format", "num_blocks"}}, then workloads;
num_blocks null lets it size its cache by itself.
"""

import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())
    settings = order["settings"]
    model = _model(order["model"], settings)
    cuda = settings["device"] == "cuda"
    answers.write(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if cuda else "cpu",
                "dtype": settings["dtype"],
                "vocab_size": model.config.vocab_size,
                "version": transformers.__version__,
            }
        )
        + "\n"
    )
    for line in sys.stdin:
        answers.write(json.dumps(_run(model, settings, json.loads(line))) + "\n")


def _model(folder: str, settings: dict) -> torch.nn.Module:
    dtype = getattr(torch, settings["dtype"])
    if settings["load_format"] == "dummy":
        with torch.device(settings["device"]):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="sdpa"
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(settings["device"]).eval()


@torch.no_grad()
def _run(model: torch.nn.Module, settings: dict, order: dict) -> dict:
    greedy = order["temperature"] == 0
    generation = GenerationConfig(
        max_new_tokens=max(order["output_lens"]), eos_token_id=-1, pad_token_id=0, do_sample=not greedy,
        **({} if greedy else {"temperature": order["temperature"], "top_k": 0, "top_p": 1.0}),
    )  # fmt: skip
    batching = ContinuousBatchingConfig(num_blocks=settings["num_blocks"])
    with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
        begin_ns = time.monotonic_ns()
        for prompt, length in zip(order["prompts"], order["output_lens"], strict=True):
            manager.add_request(prompt, max_new_tokens=length)
        tokens, finished, errors = 0, 0, []
        while finished < len(order["prompts"]) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished += 1
                tokens += len(result.generated_tokens)
                errors += [str(result.error)] if result.error else []
        end_ns = time.monotonic_ns()
    if finished < len(order["prompts"]):
        errors.append(f"it stopped after {finished} of {len(order['prompts'])} requests")
    return {"begin_ns": begin_ns, "end_ns": end_ns, "output_tokens": tokens, "errors": errors[:3]}


if __name__ == "__main__":
    main()
