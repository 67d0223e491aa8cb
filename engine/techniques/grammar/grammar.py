"""Grammars that an output must follow, by llguidance. Knows no torch: the front checks with it what the core runs."""

import json
import re
import threading
from collections import OrderedDict
from pathlib import Path

import llguidance
import numpy as np

from sojourn.engine.sampling import Grammar
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import InputError, ModelError

# Between two parts of a JSON value: enough to indent it, and an end to the blanks that a poor model would never end.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# Else each step spells out all that can only follow in one way, however long: a short grammar may force a gigabyte.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
REMEMBERED = 32  # grammars that were compiled last: the choices of one call, and a schema that comes with every request
LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class GrammarError(InputError):
    """A grammar that cannot be followed, with a sentence."""


class GrammarCompiler:
    """The tokens of one model as llguidance reads them. Slow to make for a large vocabulary (about a second)."""

    def __init__(self, folder: Path, vocab_size: int | None = None):
        """`vocab_size` is the width of the model's logits, if it is not what config.json says. A tokenizer may have
        more ids, which are never drawn. Raises ModelError."""
        tokenizer = Tokenizer(folder)
        try:
            spelled = llguidance.TokenizerWrapper(_Spelled(tokenizer, vocab_size or tokenizer.vocab_size))
            self._tokenizer = llguidance.LLTokenizer(spelled, eos_token=tokenizer.stop_token_ids or None)
        except Exception as error:  # the library raises what its Rust side finds
            raise ModelError(f"structured output cannot use the tokenizer of {folder}: {error}") from None
        self.vocab_size = self._tokenizer.vocab_size
        self._beginnings: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of _beginnings
        # The library knows some end tokens by their names. Only those end an output that the request stops at.
        self._ends: list[int] = []
        nothing = self.compile(Grammar("regex", ""))
        mask = np.zeros(nothing.words, dtype=np.int32)
        nothing.fill(mask, [])
        self._ends = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()

    def compile(self, grammar: Grammar) -> "Guide":
        """A guide at the beginning of an output. Lets other threads run meanwhile. Raises GrammarError."""
        with self._lock:
            beginning = self._beginnings.get(grammar)
        if beginning is None:
            beginning = self._compiled(grammar)
        with self._lock:
            self._beginnings[grammar] = beginning
            self._beginnings.move_to_end(grammar)
            if len(self._beginnings) > REMEMBERED:
                self._beginnings.popitem(last=False)
            return Guide(beginning.deep_copy(), self.vocab_size, self._ends)

    def _compiled(self, grammar: Grammar) -> llguidance.LLMatcher:
        try:
            source = _SOURCES[grammar.kind](grammar.source)
            if grammar.head:
                source = f"start: head answer\n{grammar.head}\nanswer: %lark {{\n{source}\n}}\n"
            source = llguidance.LLMatcher.grammar_from_lark(source + NO_FORCING)
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        except (ValueError, RecursionError) as error:
            raise GrammarError(_sentence(str(error), grammar.kind)) from None
        if matcher.is_error():
            raise GrammarError(_sentence(matcher.get_error(), grammar.kind))
        return matcher


class _Spelled:
    """The tokens of a model as its texts spell them: a grammar and a text never differ in a blank."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.vocabulary.bytes_of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size]
        self.eos_token_id = next(iter(tokenizer.stop_token_ids), 0)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


class Guide:
    """Where one output stands in its grammar. Not for two threads at once."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_token_ids: list[int]):
        self._matcher = matcher
        self._ends = end_token_ids
        self.words = -(-vocab_size // 32)
        self.error: str | None = None
        self.complete = False  # nothing more may follow
        self.overtime_ns = 0  # CPU time of its masks beyond the usual

    @property
    def may_end(self) -> bool:
        if self.error is not None:  # perhaps a thread is still at it
            return False
        return self.complete or self._matcher.is_accepting()

    def fill(self, mask: np.ndarray, stop_token_ids: list[int]) -> None:
        """Writes the tokens that may come next into `mask` [words] int32, a bit for each, and stop tokens if the output
        may end here. Lets other threads run meanwhile; sets `error` where the grammar turns out to be too much."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self.error = f"the grammar could not be followed: {_first_line(self._matcher.get_error())}"
            return
        may_end = self.may_end
        for token in {*self._ends, *stop_token_ids}:
            word, bit = token // 32, np.int32(1 << (token % 32) if token % 32 < 31 else -(1 << 31))
            if token in stop_token_ids and (may_end or (mask[word] & bit and self._ends_with(token))):
                mask[word] |= bit
            else:
                mask[word] &= ~bit

    def fill_drafted(self, masks: np.ndarray, stop_token_ids: list[int], drafts: tuple[int, ...]) -> None:
        """`fill` for the next token, and for the one behind each draft: `masks` [1 + drafts, words]. Behind a draft
        that the grammar forbids the masks stay empty: no token is sampled there that counts."""
        self.fill(masks[0], stop_token_ids)
        consumed = 0
        for mask, draft in zip(masks[1:], drafts, strict=True):
            if self.error is not None or self._matcher.is_stopped() or not self._matcher.consume_token(draft):
                break
            consumed += 1
            self.fill(mask, stop_token_ids)
        if consumed and self.error is None:
            self._matcher.rollback(consumed)

    def allowed(self, drafts: list[int]) -> list[int]:
        """Those of the drafts, from the first on, with which the output may go on."""
        if self.error is not None or self.complete:
            return []
        return drafts[: self._matcher.validate_tokens(drafts)]

    def _ends_with(self, token_id: int) -> bool:
        """Whether an end token that the grammar itself demands is the last thing that it demands."""
        ahead = self._matcher.deep_copy()
        return ahead.consume_token(token_id) and ahead.is_accepting()

    def consume(self, token_id: int, stop_token_ids: list[int]) -> None:
        """The output goes on with a token that the mask allowed."""
        if token_id in stop_token_ids:
            self.complete = True
        elif self._matcher.consume_token(token_id):
            self.complete = self._matcher.is_stopped()
        else:
            self.error = f"the grammar could not be followed: {_first_line(self._matcher.get_error())}"


def _json_schema(source: str) -> str:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITESPACE})
    return f"start: %json {json.dumps(json.loads(grammar)['grammars'][0]['json_schema'])}"


def _regex(source: str) -> str:
    return json.loads(llguidance.LLMatcher.grammar_from_regex(source))["grammars"][0]["lark_grammar"]


# Kind → how it is written in Lark.
_SOURCES = {"json_schema": _json_schema, "regex": _regex, "lark": str}


def _sentence(error: str, kind: str) -> str:
    """Why a grammar is refused. Only for Lark does the place that the library names belong to the user's own text."""
    line = _first_line(error)
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", line)
    where = f"line {place[1]}, column {place[2]}: " if place and kind == "lark" else ""
    what = line[place.end() :] if place else line
    if (of_schema := what.removeprefix("failed to compile JSON schema: ")) != what:
        where, what = "", of_schema  # the place is that of the schema in a grammar around it
    if what.endswith("regex parse error:"):  # then the regex is quoted, on lines of its own, and the reason follows
        quoted, *rest = error.partition("regex parse error:\n")[2].splitlines() or [""]
        reason = next((line.removeprefix("error: ") for line in rest if line.startswith("error: ")), "cannot be read")
        what = _first_line(f"invalid regex {quoted.strip()}: {reason}")
    return where + what


def _first_line(error: str) -> str:
    """What the library says, without its traces, and short enough to be shown."""
    line = error.strip().partition("\n")[0]
    return line if len(line) <= 300 else f"{line[:300]}..."
