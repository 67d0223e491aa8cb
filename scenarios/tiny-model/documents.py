"""Paragraphs laid out as documents, plain and as chat turns, and as tokens: what a training step reads."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from corpus import Paragraph
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


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
