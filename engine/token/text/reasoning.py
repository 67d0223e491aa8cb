"""Finds the reasoning that stands before a model's answer, in the markers that its chat template taught it.

Linear, and loses no text but the markers and the white space around them.
"""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sojourn.engine.token.tools.calls import overlap

_NEVER = 2**62
_GAP = r"GAP: /[ \n]{0,4}/"  # models write it between the closer and the answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How one family of models marks its reasoning."""

    name: str
    opener: str
    closer: str
    implied: bool = False  # an output begins with reasoning, also without the opener

    def tokens(self, added_tokens: Mapping[str, int]) -> dict[str, int]:
        """The markers that a tokenizer writes as one token."""
        return {marker: added_tokens[marker] for marker in (self.opener, self.closer) if marker in added_tokens}

    def after(self, prompt_end: str, *, continues: bool = False) -> "Reasoning | None":
        """How an output reasons whose prompt ends so; None where the prompt says that it does not.

        With `continues` the text is the beginning of the turn itself. Else only its very end counts: a user may write
        markers, too.
        """
        end = prompt_end.rstrip()
        if continues:
            opened, closed = end.rfind(self.opener), end.rfind(self.closer)
            if max(opened, closed) >= 0:
                return Reasoning(self, is_open=True) if opened > closed else None
        elif end.endswith(self.closer):
            return None
        return Reasoning(self, is_open=self.implied or end.endswith(self.opener))


FORMATS = {
    reasoning_format.name: reasoning_format
    for reasoning_format in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", implied=True),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
        ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}


def chosen_format(setting: str | None, shown: ReasoningFormat | None) -> ReasoningFormat | None:
    """As the template shows it, unless a setting says otherwise."""
    return shown if setting is None else FORMATS.get(setting)


def format_of(template: str) -> ReasoningFormat | None:
    """The format that a chat template shows to its model; None where it shows none that is known."""
    for reasoning_format in FORMATS.values():
        if reasoning_format.implied != (reasoning_format.opener not in template):
            continue
        if reasoning_format.closer in template:
            return reasoning_format
    return None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How one output reasons: from its beginning, or where the model opens it before any other text."""

    format: ReasoningFormat
    is_open: bool

    def grammar_head(self, added_tokens: Mapping[str, int], max_tokens: int | None = None) -> str:
        """Lark of the rule `head`: the reasoning before an answer that follows a grammar.

        `max_tokens` bounds the text between the markers, and needs a closer that is one token.
        """
        tokens = self.format.tokens(added_tokens)
        closer = tokens.get(self.format.closer)
        if closer is None:
            opener = "" if self.is_open else re.escape(self.format.opener).replace("/", r"\/")
            text = rf"inside[lazy]: /{opener}(?s:.*){re.escape(self.format.closer)}/".replace("</", r"<\/")
            inside, rules = "inside GAP", [text]
        else:
            bound = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
            inside, rules = f"text <[{closer}]> GAP", [f"text{bound}: /(?s:.*)/"]
            opener = tokens.get(self.format.opener)
            opener = f'"{self.format.opener}"' if opener is None else f"<[{opener}]>"
            inside = f"{opener}? {inside}" if self.is_open else f"{opener} {inside}"
        head = f"head: {inside}" if self.is_open else f"head: ({inside})?"
        return "\n".join([head, *rules, _GAP])


class ReasoningParser:
    """Text → reasoning and answer, as it comes."""

    def __init__(self, reasoning: Reasoning):
        self._format = reasoning.format
        self._is_open = reasoning.is_open
        self._state = "before"  # before, inside, gap, answer
        self._rest = ""  # may be the beginning of a marker
        self._blanks: list[str] = []  # white space that may stand around reasoning
        self._has_text = False  # of reasoning
        self._read = 0  # characters of the text so far
        self._end: int | None = None  # characters up to the end of the closer

    def push(self, piece: str) -> tuple[str, str]:
        """The reasoning and the answer that the piece completes."""
        self._read += len(piece)
        text, self._rest = self._rest + piece, ""
        if self._state == "before":
            text = self._before(text)
        reasoning, text = self._inside(text) if self._state == "inside" else ("", text)
        if self._state == "gap":
            text = text.lstrip()
            self._state = "answer" if text else "gap"
        return reasoning, text if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """The rest, once no more text comes."""
        rest, self._rest = "".join(self._blanks) + self._rest, ""
        self._blanks.clear()
        if self._state == "before" and not self._is_open:
            return "", rest
        return (rest.rstrip() if self._has_text else rest.strip()) if self._state != "gap" else "", ""

    @property
    def end(self) -> int:
        """Characters of the text before its answer; more than any text has while the reasoning goes on."""
        if self._state == "inside" or (self._state == "before" and self._is_open):
            return _NEVER
        return self._end or 0

    def tokens(self, offsets: Sequence[int]) -> int:
        """Tokens of the reasoning and its markers. `offsets` are the characters before each token of the output."""
        return bisect_left(offsets, self.end)

    def _before(self, text: str) -> str:
        """White space, and perhaps the opener. Returns what is to be read on."""
        start = len(text) - len(text.lstrip())
        self._blanks.append(text[:start])
        text = text[start:]
        opener = self._format.opener
        if not text or (len(text) < len(opener) and opener.startswith(text)):
            self._rest = text
            return ""
        if text.startswith(opener):
            self._state, text = "inside", text[len(opener) :]
            self._blanks.clear()
        elif self._is_open:
            self._state = "inside"
        else:
            self._state, text = "answer", "".join(self._blanks) + text
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        """Reasoning that can be shown, and what stands behind the closer."""
        before, closer, after = text.partition(self._format.closer)
        if closer:
            self._state, self._end = "gap", self._read - len(after)
        else:
            shown = len(text) - overlap(text, closer := self._format.closer)
            before, self._rest, after = text[:shown], text[shown:], ""
        return self._stripped(before), after

    def _stripped(self, text: str) -> str:
        """White space waits until a word follows it, and none stands at the beginning."""
        words = text.rstrip()
        if not words:
            self._blanks.append(text)
            return ""
        shown = "".join(self._blanks) + words
        self._blanks = [text[len(words) :]]
        shown, self._has_text = shown if self._has_text else shown.lstrip(), True
        return shown
