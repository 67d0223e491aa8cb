"""The tokenizer in a GGUF file, as a tokenizer.json. The split patterns are those that the models publish."""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sojourn.engine.token.gguf.ends import END_NAMES, role_id
from sojourn.engine.token.gguf.file import GGUFFile
from sojourn.metrics.errors import ModelError

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS = {
    "qwen2": (rf"{_APOSTROPHES}|{_LETTERS}|\p{{N}}|{_REST}",),
    "llama-bpe": (rf"{_APOSTROPHES}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",),
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),  # of files without a name, too
}
SAME_SPLIT = {
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), "qwen2"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama-bpe"),
    **dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais"), "gpt-2"),
    "smaug-bpe": "llama-bpe",
}
# Where the file does not say, these begin with BOS. An entry of the vocabulary is one token, whatever the merges say.
WHOLE_ENTRIES = {"llama-bpe", *(name for name, split in SAME_SPLIT.items() if split == "llama-bpe")} - {"smaug-bpe"}
CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2  # of tokenizer.ggml.token_type
_TEMPLATE = "tokenizer.chat_template"
BLANK = "\u2581"  # stands for a space in SentencePiece


def tokenizer_json(file: GGUFFile) -> str:
    """Raises ModelError for a kind of tokenizer that is not known."""
    metadata = file.metadata
    if (whole := metadata.get("tokenizer.huggingface.json")) is not None:
        return whole
    kind = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers or "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(f"{file.path} has a tokenizer of the kind {kind!r}; put the model's tokenizer.json beside it")
    tokenizer = makers[kind](file, metadata["tokenizer.ggml.tokens"])
    typed = list(zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type") or [], strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == CONTROL or t in END_NAMES]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED])
    begins = kind == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_ENTRIES
    _add_ends(tokenizer, file, begins=begins)
    return tokenizer.to_str()


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """What a tokenizer_config.json would say: the template, and the tokens that it names."""
    metadata = file.metadata
    config = {}
    if (template := metadata.get(_TEMPLATE)) is not None:
        config["chat_template"] = template
    # Further ones, such as tokenizer.chat_template.tool_use
    named = {
        key.removeprefix(f"{_TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{_TEMPLATE}.")
    }
    if named:
        config["chat_template"] = ({} if template is None else {"default": template}) | named
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = role_id(metadata, key)
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[f"{role}_token"] = tokens[number]
    return config


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    splits = SPLITS.get(SAME_SPLIT.get(name, name))
    if splits is None or "tokenizer.ggml.merges" not in file.metadata:
        raise ModelError(f"{file.path} splits texts as {name!r}, which is not known; put tokenizer.json beside it")
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(_bpe(file, vocabulary, merges, ignore_merges=name in WHOLE_ENTRIES))
    if SPLITS["qwen2"] == splits:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """The merges follow from the scores: a pair is joined the earlier, the better the score of what it makes."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    joined = sorted(_pairs(vocabulary, scores), key=lambda pair: (-pair[0], pair[1]))
    unknown = next((t for t, kind in zip(tokens, file.metadata.get("tokenizer.ggml.token_type") or [], strict=False)
                    if kind == UNKNOWN), None)  # fmt: skip
    tokenizer = Tokenizer(
        _bpe(file, vocabulary, [pair[2] for pair in joined], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(BLANK)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _pairs(vocabulary: dict[str, int], scores: list[float]) -> Iterable[tuple[float, int, tuple[str, str]]]:
    for token, index in vocabulary.items():
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        for pair in sorted(known, key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]])):
            yield scores[index], index, pair


def _bpe(file: GGUFFile, vocabulary: dict[str, int], merges: list[tuple[str, ...]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file.path} has a tokenizer that is not consistent: {error}") from None


def _add_ends(tokenizer: Tokenizer, file: GGUFFile, *, begins: bool) -> None:
    """The tokens before and behind a text. Raises ModelError where one is wanted that the vocabulary does not have."""
    metadata, tokens = file.metadata, file.metadata["tokenizer.ggml.tokens"]
    shape, known = ["$A"], []
    for role, is_wanted in (("bos", begins), ("eos", False)):
        number = role_id(metadata, role)
        if not metadata.get(f"tokenizer.ggml.add_{role}_token", is_wanted):
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise ModelError(
                f"{file.path} begins or ends texts with a token that it lacks: tokenizer.ggml.{role}_token_id="
                f"{number}; put tokenizer.json beside it"
            )
        shape = [tokens[number], *shape] if role == "bos" else [*shape, tokens[number]]
        known.append((tokens[number], number))
    if known:
        pair = [*shape, *(part.replace("$A", "$B") for part in shape)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=shape, pair=pair, special_tokens=list(dict(known).items())
        )


def document(file: GGUFFile, name: str) -> dict[str, Any]:
    """A JSON file of a checkpoint folder, made of the metadata; {} where they say nothing of it."""
    from sojourn.engine.token.gguf.config import config_of, generation_config_of

    if name == "config.json":
        return config_of(file)
    if name == "generation_config.json":
        return generation_config_of(file)
    if name == "tokenizer_config.json":
        return tokenizer_config(file)
    return json.loads(tokenizer_json(file)) if name == "tokenizer.json" else {}
