"""Trains the bundled tiny model from text that is already on the machine, and writes its Hugging Face folder.

    GOMP_SPINCOUNT=0 python train.py --compile --minutes 20  # what the checkpoint beside this file was made with
    GOMP_SPINCOUNT=0 python train.py --steps 8000            # the schedule counted in steps: the seed repeats the run

Four stages, top to bottom: prose paragraphs are gathered from the docstrings of the standard library and of
permissively licensed packages; a byte-level BPE is trained on them; they are laid out as plain text and as chat turns;
a Qwen3-shaped model learns them, on short windows first and on long ones at the end. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import math
import random
import re
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import setuptools  # noqa: F401  (find_spec("pip") would make a later import of it fail, and torch.compile with it)
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
STANDARD_LIBRARY = "stdlib"

# Every source of text and its licence. Only these are read; a package that is not installed is skipped, and said so.
SOURCES = {
    STANDARD_LIBRARY: "PSF-2.0",
    "_pytest": "MIT", "altair": "BSD-3-Clause", "anyio": "MIT", "attr": "MIT", "click": "BSD-3-Clause", "duckdb": "MIT",
    "fastapi": "MIT", "flask": "BSD-3-Clause", "fsspec": "BSD-3-Clause", "gevent": "MIT", "httpx": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0", "jinja2": "BSD-3-Clause", "locust": "MIT", "mpmath": "BSD-3-Clause",
    "narwhals": "MIT", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause", "openai": "Apache-2.0",
    "packaging": "Apache-2.0 OR BSD-2-Clause", "pandas": "BSD-3-Clause", "pip": "MIT", "playwright": "Apache-2.0",
    "plotly": "MIT", "prometheus_client": "Apache-2.0 AND BSD-2-Clause", "psutil": "BSD-3-Clause",
    "pyarrow": "Apache-2.0", "pydantic": "MIT", "pygments": "BSD-2-Clause", "setuptools": "MIT",
    "sortedcontainers": "Apache-2.0", "streamlit": "Apache-2.0", "sympy": "BSD-3-Clause", "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0", "uvicorn": "BSD-3-Clause", "watchdog": "Apache-2.0", "websockets": "BSD-3-Clause",
    "werkzeug": "BSD-3-Clause",
}  # fmt: skip
# Copies of other people's code inside these packages have licences of their own; test suites are not prose.
NOT_READ = {"site-packages", "test", "tests", "_vendor", "_vendored", "vendor", "vendored", "lib2to3", "ensurepip"}

END_OF_TEXT, TURN_START, TURN_END, PAD = SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
# Tools are shown and called in the Hermes format. The model was not trained on them: only a grammar makes it call.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'These functions can be called:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\nWrite a call as\\n<tool_call>\\n' }}"
    '{{ \'{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB_SIZE = 2560
MAX_POSITION = 4096
PEAK_LEARNING_RATE = 4e-3
# (share of the run after which it holds, window length, windows per step)
WINDOW_PHASES = [(0.0, 128, 8), (0.78, 512, 2), (0.92, 2048, 1)]
# A word seen less often than this in the whole text is rare; a paragraph may hold one in forty words. A model this
# small misspells what it seldom reads, and its text looks more like English without.
RARE_BELOW = 5


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One paragraph of prose. `subject` names what it documents, on the first paragraph of a docstring only."""

    text: str
    subject: str = ""


_ROLE = re.compile(r":[\w:+-]+:`~?\.?([^`<]*?)(?:\s*<[^>]*>)?`")
_QUOTED_CODE = re.compile(r"`+([^`]*)`+_*")
_EMPHASIS = re.compile(r"\*\*?([A-Za-z][^*]*)\*\*?")
_SENTENCES_ONLY = re.compile(r"[A-Z][A-Za-z0-9 .,;:'\"()?!-]*[.!?]")
_LOOKS_LIKE_CODE = re.compile(r"[a-z]\.[a-z]|\w\(|[a-z][A-Z]|:\S|\.\.|\d{5}|--|[A-Z]{9}")
_PLAIN_WORD = re.compile(r"[\"'(]?[A-Za-z][a-z'-]*[)\"'.,;:?!]*")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def prose(paragraph: str) -> str | None:
    """The paragraph on one line without markup, or None where it is not plain English sentences."""
    text = " ".join(paragraph.split())
    for markup in (_ROLE, _QUOTED_CODE, _EMPHASIS):
        text = markup.sub(r"\1", text)
    words = text.split()
    if len(words) < 8 or len(text) > 1500 or not _SENTENCES_ONLY.fullmatch(text) or _LOOKS_LIKE_CODE.search(text):
        return None
    return text if sum(bool(_PLAIN_WORD.fullmatch(word)) for word in words) > 0.9 * len(words) else None


def documented_strings(source: str) -> Iterator[tuple[str, str]]:
    """(subject, text) of every string literal of a module that is long enough to be documentation, in source order."""
    tree = ast.parse(source)
    subjects: dict[ast.AST, str] = {}
    fragments: set[ast.AST] = set()  # of f-strings: not whole sentences
    literals: list[ast.Constant] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(node.body[0], ast.Expr):
                subjects[node.body[0].value] = node.name.strip("_").replace("_", " ")
        elif isinstance(node, ast.JoinedStr):
            fragments.update(node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 50:
            literals.append(node)
    for node in sorted(literals, key=lambda literal: (literal.lineno, literal.col_offset)):
        if node not in fragments:
            yield subjects.get(node, ""), node.value


def source_folder(name: str) -> Path | None:
    """Where the modules of one of the SOURCES lie, without importing them; None where it is not installed."""
    if name == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(name)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def gather_paragraphs() -> list[Paragraph]:
    """Reads the installed sources in a fixed order. A paragraph whose first 60 characters were seen is dropped."""
    seen: set[str] = set()
    paragraphs: list[Paragraph] = []
    for name in SOURCES:
        root = source_folder(name)
        if root is None:
            print(f"  {name:20} not installed: skipped")
            continue
        num_characters = 0
        for path in sorted(root.rglob("*.py")):
            if NOT_READ.intersection(path.relative_to(root).parts):
                continue
            try:
                strings = list(documented_strings(path.read_text(encoding="utf-8")))
            except (SyntaxError, UnicodeDecodeError):  # templates and deliberately broken examples
                continue
            for subject, string in strings:
                for index, block in enumerate(re.split(r"\n\s*\n", inspect.cleandoc(string))):
                    text = prose(block)
                    if text and text[:60] not in seen:
                        seen.add(text[:60])
                        paragraphs.append(Paragraph(text, subject if index == 0 else ""))
                        num_characters += len(text)
        print(f"  {name:20} {num_characters / 1e3:8.0f} kB  {SOURCES[name]}", flush=True)
    return paragraphs


def drop_rare_words(paragraphs: list[Paragraph]) -> list[Paragraph]:
    """The paragraphs that keep to common words; a subject with a rare word is forgotten."""
    counts = Counter(word for paragraph in paragraphs for word in _WORD.findall(paragraph.text.lower()))

    def num_rare(text: str) -> int:
        return sum(counts[word] < RARE_BELOW for word in _WORD.findall(text.lower()))

    return [
        Paragraph(paragraph.text, "" if num_rare(paragraph.subject) else paragraph.subject)
        for paragraph in paragraphs
        if 40 * num_rare(paragraph.text) <= len(paragraph.text.split())
    ]


def split_held_out(paragraphs: list[Paragraph]) -> tuple[list[Paragraph], list[Paragraph]]:
    """(training, held out): every fiftieth run of twenty neighbouring paragraphs is held out."""
    training = [paragraph for index, paragraph in enumerate(paragraphs) if index // 20 % 50 != 49]
    return training, [paragraph for index, paragraph in enumerate(paragraphs) if index // 20 % 50 == 49]


def write_prompts(paragraphs: list[Paragraph], path: Path, num_bytes: int, rng: random.Random) -> None:
    """The file that the load generator cuts prompts from: one paragraph a line, runs of five neighbours, shuffled."""
    long_enough = [paragraph.text for paragraph in paragraphs if len(paragraph.text) >= 100]
    runs = [long_enough[start : start + 5] for start in range(0, len(long_enough), 5)]
    rng.shuffle(runs)
    text = "\n".join(line for run in runs for line in run)
    path.write_text(text[: text.index("\n", num_bytes)] + "\n", encoding="utf-8")


def turn(role: str, content: str) -> str:
    """One message, exactly as the chat template writes it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def answer_length(rng: random.Random) -> int:
    """Paragraphs in an answer: mostly one to four, with a long tail, so that answers end at a spread of lengths."""
    return 1 + min(40, int(rng.expovariate(1 / rng.choice([1.5, 3.0, 8.0]))))


def lay_out(paragraphs: list[Paragraph], rng: random.Random) -> Iterator[str]:
    """Every paragraph once, grouped at random with its neighbours: half of the documents plain, half in chat form."""
    position = rng.randrange(10)

    def take(count: int) -> str:
        nonlocal position
        chosen = paragraphs[position : position + count]
        position += count
        return "\n\n".join(paragraph.text for paragraph in chosen)

    while position < len(paragraphs):
        if rng.random() < 0.5:
            yield take(answer_length(rng)) + END_OF_TEXT
            continue
        turns = [turn("system", "You are a helpful assistant.")] if rng.random() < 0.15 else []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if position >= len(paragraphs):
                break
            subject = paragraphs[position].subject
            if subject and rng.random() < 0.6:
                question = rng.choice(["What does {} do?", "What is {}?", "Explain {}.", "Tell me about {}.", "{}"])
                turns += [turn("user", question.format(subject)), turn("assistant", take(answer_length(rng)))]
                continue
            sentences = _SENTENCE_END.split(paragraphs[position].text, maxsplit=1)
            if len(sentences) == 2 and rng.random() < 0.7:
                position += 1
                answer = "\n\n".join(filter(None, [sentences[1], take(answer_length(rng) - 1)]))
                turns += [turn("user", sentences[0]), turn("assistant", answer)]
            else:
                turns += [turn("user", take(answer_length(rng))), turn("assistant", take(answer_length(rng)))]
        yield "".join(turns) + END_OF_TEXT


def train_tokenizer(paragraphs: list[Paragraph]) -> Tokenizer:
    """A byte-level BPE: any text can be written, the special tokens are the first four ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((paragraph.text for paragraph in paragraphs), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json`, the chat template inside the latter."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITION,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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


class TokenStream:
    """Random windows of the laid-out text, laid out afresh for each epoch."""

    def __init__(self, paragraphs: list[Paragraph], tokenizer: Tokenizer, rng: random.Random) -> None:
        self.paragraphs, self.tokenizer, self.rng = paragraphs, tokenizer, rng
        self.epoch, self.num_left = 0, 0
        self.tokens = torch.empty(0, dtype=torch.long)

    def next_batch(self, num_windows: int, window: int) -> torch.Tensor:
        """Token ids [num_windows, window]."""
        if self.num_left <= 0:
            documents = list(lay_out(self.paragraphs, self.rng))
            self.rng.shuffle(documents)
            encoded = self.tokenizer.encode_batch(documents)
            self.tokens = torch.tensor([token for document in encoded for token in document.ids])
            self.num_left = len(self.tokens)
            self.epoch += 1
        self.num_left -= num_windows * window
        starts = [self.rng.randrange(len(self.tokens) - window) for _ in range(num_windows)]
        return torch.stack([self.tokens[start : start + window] for start in starts])


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
