"""Text ↔ ids, with the checkpoint's own tokenizer.json."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from sojourn.engine.token.checkpoint import read_config, read_json, tokenizer_source
from sojourn.engine.token.text.decoders import Decoder
from sojourn.engine.token.text.stream import TextStream
from sojourn.engine.token.text.tokenizer_class import split_as_transformers
from sojourn.engine.token.text.vocabulary import Vocabulary
from sojourn.metrics.errors import ModelError

log = logging.getLogger(__name__)


class Tokenizer:
    """Owns a tokenizer and what the checkpoint says about where a text ends."""

    def __init__(self, folder: Path):
        config = read_config(folder)
        if (source := tokenizer_source(folder)) is None:
            raise ModelError(
                f"{folder} has no tokenizer.json; save the tokenizer in its fast format beside the weights"
            )
        try:
            self._tokenizer = HuggingFaceTokenizer.from_str(source)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"tokenizer.json of {folder} cannot be read: {error}") from None
        split_as_transformers(self._tokenizer, config, read_json(folder, "tokenizer_config.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = config.get("vocab_size") or self._tokenizer.get_vocab_size()
        self.longest_token_bytes = max(len(text.encode()) for text in self._tokenizer.get_vocab())
        self.stop_token_ids = self._stop_token_ids(folder, config)
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}  # written as one id each
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.special_token_ids = sorted(self._special)
        decoder = self._tokenizer.decoder
        self._decoder = Decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        self._names = set(self._special.values())
        self._entries: dict[bool, dict[int, str | None]] = {True: {}, False: {}}
        self.vocabulary = Vocabulary(self._tokenizer, self._decoder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. A rendered chat brings its special tokens itself and wants none added."""
        # A batch of one, because only batches let other threads run meanwhile.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, ids: list[int]) -> list[str]:
        """The ids' entries in the vocabulary; "" for an id without one."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def stream(
        self,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
        keeps_blank: bool = False,
    ) -> TextStream:
        """The text of ids to come behind those of a prompt, with or without special tokens; `shown_token_ids` are seen
        in any case. `keeps_blank` for outputs whose grammar counts a first blank that the decoder would take away."""
        shown = {token_id: self._special[token_id] for token_id in shown_token_ids if token_id in self._special}
        entry_of = self._visible if skip_special_tokens else self._entry
        shown = shown if skip_special_tokens else {}
        return TextStream(self._decoder, entry_of, shown, prompt, keeps_blank=keeps_blank)

    def _entry(self, token_id: int) -> str | None:
        known = self._entries[False]
        if token_id not in known:
            known[token_id] = self._tokenizer.id_to_token(token_id)
        return known[token_id]

    def _visible(self, token_id: int) -> str | None:
        known = self._entries[True]
        if token_id not in known:
            entry = self._entry(token_id)
            known[token_id] = None if entry in self._names else entry
        return known[token_id]

    def _stop_token_ids(self, folder: Path, config: dict) -> list[int]:
        """All that any file of the checkpoint calls an end: a chat's end often stands in one of them alone. Raises
        ModelError for what is no id."""
        found: set[int] = set()
        for name, source in (
            ("config.json", config),
            ("generation_config.json", read_json(folder, "generation_config.json")),
        ):
            listed = source.get("eos_token_id")
            listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
            if not all(type(token) is int for token in listed):
                raise ModelError(f"{name} has eos_token_id={listed!r}; it must be an id, or a list of ids")
            found |= set(listed)
        named = read_json(folder, "tokenizer_config.json").get("eos_token")
        name = named.get("content") if isinstance(named, dict) else named
        if isinstance(name, str) and (token := self._tokenizer.token_to_id(name)) is not None:
            found.add(token)
        usable = sorted(token for token in found if 0 <= token < self.vocab_size)  # the model samples no others
        if beyond := sorted(found.difference(usable)):
            log.warning(
                "end tokens %s lie outside of the vocabulary of %d: they end no text%s",
                beyond, self.vocab_size, "" if usable else ", and nothing else does",
            )  # fmt: skip
        return usable


class NoTokenizer:
    """Stands in where a checkpoint has none, as a bare config.json with random weights: ids go in, ids come out."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.vocab_size: int = read_config(folder).get("vocab_size", 0)  # without it the model is refused
        self.stop_token_ids: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise ModelError(f"{self._folder} has no tokenizer.json, so a prompt is a list of token ids, not a text")

    def stream(self, prompt: Sequence[int] = (), **options: object) -> "NoText":
        return NoText()


class NoText:
    """The text of ids without a tokenizer: empty."""

    num_characters = num_open = 0
    ahead = ""
    is_broken = False

    def push(self, token_id: int) -> str:
        return ""

    def rest(self) -> str:
        return ""
