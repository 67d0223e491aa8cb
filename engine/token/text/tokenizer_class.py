"""What transformers' AutoTokenizer makes of a tokenizer.json: some classes build the splitting of texts anew, from keys
of tokenizer_config.json, whatever tokenizer.json says."""

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from sojourn.engine.token.models.settings import shown
from sojourn.metrics.errors import ModelError

BLANK = "\u2581"  # stands for a space in SentencePiece
# Model types whose tokenizer is of this class where the files name none.
CLASSES = dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer") | {"mpt": "GPTNeoXTokenizer"}
# Model types whose tokenizer is of this class, whatever class the files name.
FORCED = {"qwen2": "Qwen2Tokenizer", "mistral": None, "mixtral": None}
ROLES = frozenset(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))  # of all classes
BYTE_LEVEL = ("Qwen2Tokenizer", "GPTNeoXTokenizer", "GPT2Tokenizer")


def split_as_transformers(tokenizer: Tokenizer, config: dict[str, Any], said: dict[str, Any]) -> None:
    """Changes how a tokenizer of tokenizer.json splits, by its class and the keys of `said`, tokenizer_config.json.

    `add_bos_token` and `add_eos_token` change nothing, as in transformers 5: tokenizer.json has what is added.
    Raises ModelError for a value that is none.
    """
    prefix, legacy, whole = (_flag(said, key) for key in ("add_prefix_space", "legacy", "split_special_tokens"))
    _mark_special(tokenizer, said)
    tokenizer.encode_special_tokens = bool(whole)
    state = "" if tokenizer.pre_tokenizer is None else json.loads(tokenizer.pre_tokenizer.__getstate__())
    is_byte_level = '"ByteLevel"' in json.dumps(state)
    made = _class(config, said, is_byte_level=is_byte_level)
    if made in BYTE_LEVEL and is_byte_level:
        _prefix_bytes(tokenizer, bool(prefix))
        if made == "GPTNeoXTokenizer":  # it adds nothing
            tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    elif made == "LlamaTokenizer" and not is_byte_level and isinstance(tokenizer.model, models.BPE):
        prefix = prefix is not False
        scheme = "never" if not prefix else "always" if legacy else "first"
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(BLANK, scheme, split=False)
        steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])


def _mark_special(tokenizer: Tokenizer, said: dict[str, Any]) -> None:
    """Tokens that tokenizer_config.json gives a role are special, whatever tokenizer.json says of them: by a key that
    ends in `_token`, or in a map of names. Further ones are, if tokenizer.json does not list them as added."""
    extra, listed = said.get("extra_special_tokens"), said.get("additional_special_tokens")
    further = _texts(next((each for each in (extra, listed) if isinstance(each, list) and each), []))
    own = {key: token for key, token in said.items() if key in ROLES or (key.endswith("_token") and _is_token(token))}
    own |= extra if isinstance(extra, dict) else {}
    if not own.keys() - ROLES and isinstance(named := said.get("model_specific_special_tokens"), dict):
        own |= named
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    special = [text for text in _texts(list(own.values())) if not added.get(text)]
    special += [text for text in further if text not in added]
    known = [text for text in special if tokenizer.token_to_id(text) is not None]
    if known:
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and value.get("__type") == "AddedToken")


def _texts(tokens: list[Any]) -> list[str]:
    """Of tokens as a config writes them; what is no text is none."""
    texts = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return [text for text in texts if isinstance(text, str) and text]


def _class(config: dict[str, Any], said: dict[str, Any], *, is_byte_level: bool) -> str | None:
    """The class that decides, without the ending Fast; None where tokenizer.json does."""
    kind, named = str(config.get("model_type")), said.get("tokenizer_class") or config.get("tokenizer_class")
    if kind in FORCED:
        return FORCED[kind]
    name = CLASSES.get(kind) if named is None else str(named).removesuffix("Fast")
    return None if name == "LlamaTokenizer" and is_byte_level else name


def _prefix_bytes(tokenizer: Tokenizer, prefix: bool) -> None:
    splitter = tokenizer.pre_tokenizer
    steps = [splitter] if isinstance(splitter, pre_tokenizers.ByteLevel) else list(splitter)
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = prefix
    if steps[0] is not splitter:
        splitter = pre_tokenizers.Sequence(steps)
    tokenizer.pre_tokenizer = splitter


def _flag(said: dict[str, Any], key: str) -> bool | None:
    value = said.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"tokenizer_config.json has {key}={shown(value)}; it must be true or false")
    return value
