"""Single ids → the bytes that they stand for, as log-probabilities show them: also half characters, special tokens."""

import re
from typing import Any

from tokenizers import Tokenizer as HuggingFaceTokenizer

_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a blank


class Vocabulary:
    """Owns the spelling of a tokenizer's entries. `decoder` is that section of its tokenizer.json."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, decoder: dict[str, Any] | None):
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in _types(decoder)
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text; an added token's name; b"" for an id that has no entry."""
        spelled = self._known.get(token_id)
        if spelled is None:
            spelled = self._known[token_id] = self._spell(token_id)
        return spelled

    def text_of(self, token_id: int) -> str:
        """The same as text, in which a half character is U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        entry = self._tokenizer.id_to_token(token_id)
        if entry is None:  # embedding tables are often padded beyond the vocabulary
            return b""
        if self._byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in entry)
        if byte := _HEX_BYTE.fullmatch(entry):
            return bytes([int(byte[1], 16)])
        return entry.replace(_BLANK, " ").encode()


def _types(decoder: dict[str, Any] | None) -> set[str]:
    """The kinds of decoder in a section, those inside a sequence included."""
    if decoder is None:
        return set()
    return {decoder.get("type", "")}.union(*(_types(inner) for inner in decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as GPT-2's byte-level tokenizers spell bytes that do not print (Radford et al., 2019)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
