"""Single ids → the bytes that they stand for, as log-probabilities show them: also half characters, special tokens."""

from tokenizers import Tokenizer as HuggingFaceTokenizer

from sojourn.engine.token.text.decoders import Decoder


class Vocabulary:
    """Owns the spelling of a tokenizer's entries, as its decoder spells them in the middle of a text."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, decoder: Decoder):
        self._tokenizer = tokenizer
        self._decoder = decoder
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
        return b"" if entry is None else self._decoder.spelled(entry)  # tables are often padded beyond the vocabulary
