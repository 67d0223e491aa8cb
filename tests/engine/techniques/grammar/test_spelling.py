"""A grammar and the text of its output never differ: not in a first blank, and for no family of tokenizers."""

import json
import random

import numpy as np
import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.server.openai.structured_output import choice
from sojourn.engine.techniques.grammar.grammar import GrammarCompiler
from sojourn.engine.token.text.tokenizer import Tokenizer
from tests.engine.token.text.kinds import tokenizer

FAMILIES = [
    "none", "llama", "gemma", "two blanks", "unigram", "unigram, first", "unigram, never", "word pieces",
    "word pieces as they stand", "byte level", "byte level, stripped", "regex",
]  # fmt: skip
CHOICES = [" hello", "  a b", "hello", "a日", " é.", "<s>", "\n\n", "do not"]


def sampled(guide, stop, chance):
    mask, ids = np.zeros(guide.words, dtype=np.int32), []
    while not guide.complete and len(ids) < 200:
        guide.fill(mask, [stop])
        if guide.error is not None:  # no entry goes on from here, as behind a blank of its own among words
            return None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids.append(int(chance.choice(allowed)))
        guide.consume(ids[-1], [stop])
    return [token_id for token_id in ids if token_id != stop]


@pytest.mark.parametrize("kind", [*FAMILIES, "bundled"])
def test_an_output_that_follows_a_choice_is_one_of_the_choices(kind, tmp_path):
    folder = model_folder("tiny-model") if kind == "bundled" else tmp_path
    if kind != "bundled":
        made = tokenizer(kind)
        made.save(str(folder / "tokenizer.json"))
        end, size = made.token_to_id("</s>"), made.get_vocab_size() + 3
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": size, "eos_token_id": end}
        (folder / "config.json").write_text(json.dumps(config))
    ours, compiler = Tokenizer(folder), GrammarCompiler(folder)
    (stop, *_), seen = ours.stop_token_ids, set()
    for option in CHOICES:  # each by itself, because a tokenizer without single characters cannot spell all
        for seed in range(4):
            ids = sampled(compiler.compile(choice([option, " a", "a"])), stop, random.Random(seed))
            if ids is None:
                continue
            for prompt in ([], [stop], ours.encode("a")):
                stream = ours.stream(prompt, keeps_blank=True)
                text = "".join(stream.push(token_id) for token_id in ids) + stream.rest()
                assert text in (option, " a", "a"), f"{text!r} of {ids} is none of the choices"
            seen.add(text)
    assert seen
