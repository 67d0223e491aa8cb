"""Trains the bundled tiny model from text that is already on the machine, and writes its Hugging Face folder.

    GOMP_SPINCOUNT=0 python train.py --compile --minutes 20  # what the checkpoint beside this file was made with
    GOMP_SPINCOUNT=0 python train.py --steps 8000            # the schedule counted in steps: the seed repeats the run

Four stages, top to bottom: prose paragraphs are gathered from docstrings (corpus.py); a byte-level BPE is trained on
them; they are laid out as plain text and as chat turns (documents.py); a Qwen3-shaped model learns them, on short
windows first and on long ones at the end. train_drafts.py trains the models that draft for it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
import warnings
from pathlib import Path

import setuptools  # noqa: F401  (find_spec("pip") would make a later import of it fail, and torch.compile with it)
import torch
from corpus import drop_rare_words, gather_paragraphs, split_held_out, write_prompts
from documents import (
    END_OF_TEXT,
    MAX_POSITION,
    PAD,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    TokenStream,
    lay_out,
    train_tokenizer,
    turn,
    write_tokenizer,
)
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
PEAK_LEARNING_RATE = 4e-3
# (share of the run after which it holds, window length, windows per step)
WINDOW_PHASES = [(0.0, 128, 8), (0.78, 512, 2), (0.92, 2048, 1)]


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """2.7 M parameters in Qwen3's shape: grouped-query attention (4 query heads on 2), q/k norms, tied embeddings."""
    end_of_text, turn_end, pad = (tokenizer.token_to_id(token) for token in (END_OF_TEXT, TURN_END, PAD))
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=416, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=MAX_POSITION, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, dtype="float32",
        bos_token_id=end_of_text, eos_token_id=turn_end, pad_token_id=pad,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=40, bos_token_id=end_of_text, eos_token_id=[turn_end, end_of_text],
        pad_token_id=pad,
    )  # fmt: skip
    return model


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor, window: int) -> float:
    """Mean cross-entropy per token over whole windows of the held-out text."""
    windows = tokens[: len(tokens) // window * window].view(-1, window)
    losses = [model(input_ids=batch, labels=batch).loss.item() for batch in windows.split(max(1, 4096 // window))]
    return sum(losses) / len(losses)


def print_samples(model: Qwen3ForCausalLM, tokenizer: Tokenizer, max_new_tokens: int) -> None:
    """Continuations at temperature 0.7, top-k 40: three in chat form, two of plain text."""
    chats = ["What is a tensor?", "How do I read a file?", "The graph has no edges."]
    prompts = {chat: turn("user", chat) + f"{TURN_START}assistant\n" for chat in chats}
    prompts |= {text: text for text in ("The function returns", "A thread is")}
    for shown, prompt in prompts.items():
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
        answer = output[0, ids.shape[1] :].tolist()
        print(f"  [{shown}] {tokenizer.decode(answer)!r} ({len(answer)} tokens)", flush=True)


def train(model: Qwen3ForCausalLM, stream: TokenStream, held_out: torch.Tensor, arguments: argparse.Namespace) -> None:
    """AdamW with warm-up and a cosine to zero, over the share of the run that is done (of its minutes or its steps)."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model, dynamic=False) if arguments.compile else model
    started = reported = time.monotonic()
    next_sample, step, num_tokens, losses = 0.25, 0, 0, []
    while True:
        done = step / arguments.steps if arguments.steps else (time.monotonic() - started) / (60 * arguments.minutes)
        if done >= 1:
            break
        _, window, num_windows = max(phase for phase in WINDOW_PHASES if phase[0] <= done)
        rate = PEAK_LEARNING_RATE * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = stream.next_batch(num_windows, window)
        forward = compiled if window == WINDOW_PHASES[0][1] else model  # compiling again would cost more than it saves
        loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
        num_tokens += batch.numel()
        if time.monotonic() - reported > 15:
            reported = time.monotonic()
            mean_loss, speed = sum(losses) / len(losses), num_tokens / (reported - started)
            progress = f"{done:5.0%}  step {step:5}  epoch {stream.epoch:2}  window {window:4}"
            print(f"{progress}  loss {mean_loss:.3f}  {speed:6.0f} tokens/s", flush=True)
            losses.clear()
        if done >= next_sample:
            next_sample += 0.25
            model.eval()
            print(f"held-out loss {held_out_loss(model, held_out, 128):.3f} (windows of 128)")
            print_samples(model, stream.tokenizer, max_new_tokens=60)
            model.save_pretrained(arguments.out)
            model.train()
    model.eval()
    print(f"{step} steps, {num_tokens / 1e6:.2f} M tokens, {stream.epoch} epochs, {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled tiny model on the docstrings of this machine.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=20.0, help="wall time of the training loop (default 20)")
    length.add_argument("--steps", type=int, help="length in steps instead of minutes")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile: worth its minute on runs of ten or more")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the checkpoint (default: beside this script)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", SyntaxWarning)  # other people's escapes, met while parsing their modules
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)

    print("Gathering prose:")
    training, held_out = split_held_out(drop_rare_words(gather_paragraphs()))
    num_megabytes = sum(len(paragraph.text) for paragraph in training) / 1e6
    print(f"{len(training)} paragraphs, {num_megabytes:.2f} MB to train on, {len(held_out)} paragraphs held out")
    write_prompts(training, arguments.out / "prompts.txt", 300_000, random.Random(arguments.seed))

    tokenizer = train_tokenizer(training)
    write_tokenizer(tokenizer, arguments.out)
    held_out_text = "".join(lay_out(held_out, random.Random(0)))
    held_out_tokens = torch.tensor(tokenizer.encode(held_out_text).ids)
    print(f"{len(held_out_text) / len(held_out_tokens):.2f} characters a token, {len(held_out_tokens)} tokens held out")

    model = build_model(tokenizer)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters")
    train(model, TokenStream(training, tokenizer, rng), held_out_tokens, arguments)
    model.save_pretrained(arguments.out)
    for window in (128, 512, 2048, MAX_POSITION):
        print(f"held-out loss {held_out_loss(model, held_out_tokens, window):.3f} in windows of {window}")
    print_samples(model, tokenizer, max_new_tokens=200)


if __name__ == "__main__":
    main()
