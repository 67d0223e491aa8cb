"""Small tokenizers of every family that `tokenizers` loads, with entries that are hard to put together."""

import json
from pathlib import Path
from types import SimpleNamespace

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sojourn.engine.config import model_folder
from sojourn.engine.token.gguf.tokenizer import tokenizer_json

WORDS = ["▁", "▁▁", "a", "b", "▁a", " a", "▁hello", "lo", "a▁b", ".", "▁.", " .", "'", "▁'", "n't", "é", "日",
         "🙂", "", "##a", "##", "##'s", "a</w>", "</w>", "b</w>a", "</w></w>", "<pad>", "|", "a|b", "do not", " 's",
         "\ufffd"]  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<s>", "</s>", "<|é|>"]
HALVES = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, 0x80, 0xA5, 0x97, 0xE6, 0xF0, 0x9F, 0x99, 0xED, 0xA0, 0xC0)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
CHAINS = {
    "none": None,
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(LLAMA),
    "two blanks": decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]),
    "unigram": decoders.Metaspace(),
    "unigram, first": decoders.Metaspace(prepend_scheme="first"),
    "unigram, never": decoders.Metaspace(prepend_scheme="never"),
    "unigram with bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace before bytes": decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]),
    "word pieces": decoders.WordPiece(),
    "word pieces as they stand": decoders.WordPiece(cleanup=False),
    "word pieces of a fused text": decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]),
    "suffix": decoders.BPEDecoder(),
    "suffix of a fused text": decoders.Sequence([decoders.Fuse(), decoders.BPEDecoder()]),
    "suffix, then a map": decoders.Sequence([decoders.BPEDecoder(), decoders.Replace("a", "aa")]),
    "ctc": decoders.CTC(),
    "ctc without cleanup": decoders.CTC(cleanup=False),
    "ctc, then bytes": decoders.Sequence([decoders.CTC(), decoders.ByteFallback()]),
    "byte level": decoders.ByteLevel(),
    "byte level, stripped": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "regex": decoders.Sequence([decoders.Replace(Regex("▁+"), "_"), decoders.ByteFallback()]),
    "regex of a fused text": decoders.Sequence([*LLAMA, decoders.Replace(Regex("a+"), "A")]),
    "pair of a fused text": decoders.Sequence([*LLAMA, decoders.Replace("aa", "b"), decoders.Strip(" ", 1, 0)]),
    "entry by entry": decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    "bytes, then entry by entry": decoders.Sequence([*LLAMA[:2], decoders.Strip(" ", 1, 0)]),
}  # fmt: skip


def tokenizer(kind: str) -> Tokenizer:
    entries = list(dict.fromkeys(["<unk>", *WORDS, *BYTES, *pre_tokenizers.ByteLevel.alphabet()]))
    made = Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}, "<unk>"))
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made.add_tokens(["<tool▁call>", "é added", " <0x41>"])
    if (chain := CHAINS[kind]) is not None:
        made.decoder = chain
    return made


def of_gguf(kind: str, **metadata: object) -> Tokenizer:
    """As a GGUF file describes it."""
    entries = ["<unk>", "<s>", "</s>", *(BYTES if kind == "llama" else pre_tokenizers.ByteLevel.alphabet()), *WORDS]
    entries = list(dict.fromkeys(entries))
    typed = [2, 3, 3] + [6 if entry in BYTES else 1 for entry in entries[3:]]
    described = {"model": kind, "tokens": entries, "token_type": typed, "merges": [], **metadata}
    file = SimpleNamespace(
        path="x.gguf", metadata={f"tokenizer.ggml.{name}": value for name, value in described.items()}
    )
    return Tokenizer.from_str(tokenizer_json(file))


def bundled() -> Tokenizer:
    return Tokenizer.from_file(str(model_folder("tiny-model") / "tokenizer.json"))


def byte_fallback_model(folder: Path) -> Tokenizer:
    """A checkpoint without weights, whose tokenizer is as that of Llama 2: most of its ids are single bytes."""
    entries = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "▁hello", "lo", "▁the", "h", "e", "l", "o", "."]
    made = Tokenizer(models.BPE({e: i for i, e in enumerate(entries)}, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = CHAINS["llama"]
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(entries), "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96,
        "max_position_embeddings": 512, "eos_token_id": 2, "bos_token_id": 1, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return made
