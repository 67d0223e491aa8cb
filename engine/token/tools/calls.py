"""Finds the tool calls in a model's text, in the format that its chat template taught it. Linear, and loses no text."""

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sojourn.engine.token.tools.json_object import CallObject, ValueEnd, skip_space

HEADER_CHARACTERS = 256  # from a call's opener to its arguments, where the name stands outside of JSON


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes calls.

    `form`: object, one {"name", "arguments"} after the opener; list, several in brackets; named, a header with the name
    and then the arguments.
    """

    name: str
    opener: str
    form: str
    closer: str = ""  # after each call
    section: str = ""  # stands before the first opener
    between: tuple[str, ...] = ()  # may stand before or after a call, and mean nothing
    separator: str = ""  # models write it between one call and the next opener
    before_closer: str = ""  # models write it between a call and its closer
    bare: bool = False  # an object at the beginning, or after another call, needs no opener
    arguments_key: str = "arguments"
    header: re.Pattern[str] | None = None  # of `named`: group 1 is the name
    header_end: str = ""  # the last characters of the header
    header_text: str = ""  # the header as models write it; {name} stands for the name
    marks: tuple[str, ...] = ()  # literals that a tokenizer may have as one token, beside opener, closer and section

    def tokens(self, added_tokens: Mapping[str, int]) -> dict[str, int]:
        """The format's literals that a tokenizer writes as one token."""
        literals = {self.opener, self.closer, self.section, *self.between, *self.marks}
        return {literal: added_tokens[literal] for literal in sorted(literals) if literal in added_tokens}


_NAME = r"([A-Za-z0-9_.-]{1,64})"

FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        ToolFormat("hermes", "<tool_call>", "object", closer="</tool_call>", separator="\n", before_closer="\n"),
        ToolFormat("llama3", "<|python_tag|>", "object", between=(";",), bare=True, arguments_key="parameters"),
        ToolFormat("mistral", "[TOOL_CALLS]", "list"),
        ToolFormat(
            "mistral_args", "[TOOL_CALLS]", "named",
            header=re.compile(rf"\s*{_NAME}(?:\[CALL_ID\]\w{{1,64}})?\[ARGS\]"),
            header_end="[ARGS]", header_text="{name}[ARGS]", marks=("[ARGS]", "[CALL_ID]"),
        ),
        ToolFormat(
            "deepseek_v3", "<｜tool▁call▁begin｜>", "named", closer="<｜tool▁call▁end｜>",
            section="<｜tool▁calls▁begin｜>", between=("\n```", "<｜tool▁calls▁end｜>"),
            separator="\n", before_closer="\n```",
            header=re.compile(rf"function<｜tool▁sep｜>{_NAME}\s*```json"),
            header_end="```json", header_text="function<｜tool▁sep｜>{name}\n```json\n",
            marks=("<｜tool▁sep｜>",),
        ),
        ToolFormat(
            "deepseek_v31", "<｜tool▁call▁begin｜>", "named", closer="<｜tool▁call▁end｜>",
            section="<｜tool▁calls▁begin｜>", between=("<｜tool▁calls▁end｜>",),
            header=re.compile(rf"\s*{_NAME}<｜tool▁sep｜>"),
            header_end="<｜tool▁sep｜>", header_text="{name}<｜tool▁sep｜>", marks=("<｜tool▁sep｜>",),
        ),
    )
}  # fmt: skip


def format_of(template: str) -> ToolFormat | None:
    """The format in which a chat template shows calls to its model; None where it shows none that is known."""
    if "tools" not in template:
        return None
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral_args" if "[ARGS]" in template else "mistral"]
    if "<｜tool▁call▁begin｜>" in template:
        return FORMATS["deepseek_v3" if "```json" in template else "deepseek_v31"]
    if '"parameters": ' in template and "ipython" in template:
        return FORMATS["llama3"]
    return None


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index`. Its first piece carries the name, and no other does."""

    index: int
    name: str | None
    arguments: str


Delta = ContentDelta | CallDelta


class ToolCallParser:
    """Text → content and calls, as it comes.

    A call has begun once the name of a declared tool and the beginning of its arguments were read; from there on its
    text is its arguments, whatever the model makes of them. All that stops short of it is given as content. White space
    around calls is dropped.
    """

    def __init__(self, tool_format: ToolFormat, names: AbstractSet[str]):
        self.num_calls = 0
        self._format = tool_format
        self._names = names
        self._literals = [literal for literal in (tool_format.opener, tool_format.section) if literal]
        self._find = re.compile("|".join(map(re.escape, self._literals))).search
        self._mode = self._outside
        self._rest = ""  # not yet consumed: the beginning of a literal, a header or a name; always short
        self._pending: list[str] = []  # consumed, and content unless a call begins
        self._object: CallObject | None = None
        self._arguments: ValueEnd | None = None
        self._in_list = False
        self._has_started = False
        self._deltas: list[Delta] = []

    def push(self, piece: str) -> list[Delta]:
        """What the piece completes, in order."""
        text, at = self._rest + piece, 0
        while at < len(text):
            mode = self._mode
            end = mode(text, at)
            if end == at and mode == self._mode:
                break  # it needs more
            at = end
        self._rest = text[at:]
        return self._take()

    def finish(self) -> list[Delta]:
        """The rest, once no more text comes: what might have become a call is content."""
        rest, self._rest = self._rest, ""
        if self._mode == self._outside and self.num_calls and not rest:
            self._pending.clear()  # white space after the last call
        self._content("".join(self._pending) + rest)
        self._pending.clear()
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _content(self, text: str) -> None:
        if text:
            self._deltas.append(ContentDelta(text))

    def _call(self, name: str | None, arguments: str) -> None:
        if name is not None or arguments:
            self._deltas.append(CallDelta(self.num_calls - 1, name, arguments))

    # Each mode consumes text from `at` on and returns where it stopped: at `at` with the mode unchanged, it needs more.

    def _outside(self, text: str, at: int) -> int:
        """At the beginning of the output, or after a call: white space and empty literals wait in `_held`."""
        end = skip_space(text, at)
        if end > at:
            self._pending.append(text[at:end])
            return end
        opener = self._format.opener
        if text.startswith(opener, at):
            return self._open(at + len(opener), opener)
        if self._format.bare and text[at] == "{":
            return self._open(at, "")
        for literal in (*self._format.between, self._format.section):
            if literal and text.startswith(literal, at):
                self._pending.append(literal)
                return at + len(literal)
        if any(literal.startswith(text[at:]) for literal in (*self._literals, *self._format.between)):
            return at
        return self._give_up(at)

    def _inside_content(self, text: str, at: int) -> int:
        found = self._find(text, at)
        if found is None:
            end = len(text) - max(overlap(text, literal, at) for literal in self._literals)
            self._content(text[at:end])
            return end
        self._content(text[at : found.start()])
        if found.group() == self._format.opener:
            return self._open(found.end(), found.group())
        self._pending.append(found.group())
        self._mode = self._outside
        return found.end()

    def _open(self, at: int, opener: str) -> int:
        self._pending.append(opener)
        self._has_started = self._in_list = False
        self._object, self._arguments = CallObject(), None
        self._mode = {"object": self._inside_object, "list": self._before_list, "named": self._inside_header}[
            self._format.form
        ]
        return at

    def _before_list(self, text: str, at: int) -> int:
        end = skip_space(text, at)
        if end == len(text):
            self._pending.append(text[at:end])
            return end
        if text[end] != "[":
            return self._give_up(at)
        self._pending.append(text[at : end + 1])
        self._in_list, self._mode = True, self._inside_object
        return end + 1

    def _inside_object(self, text: str, at: int) -> int:
        call = self._object
        end = call.feed(text, at)
        if not self._has_started:
            self._pending.append(text[at:end])
            if call.name is not None and call.name not in self._names:
                return self._give_up(end)
            if call.name is not None and call.has_arguments:
                self._begin(call.name)
        if self._has_started:
            self._call(None, call.take_arguments())
        if call.state == "broken" or (call.state == "done" and not self._has_started):
            return self._give_up(end)
        if call.state == "done":
            self._mode = self._after_element if self._in_list else self._after_call
        return end

    def _inside_header(self, text: str, at: int) -> int:
        """A name before the arguments. Short: looked at as a whole once its end is there."""
        end = text.find(self._format.header_end, at, at + HEADER_CHARACTERS)
        if end < 0:
            return at if len(text) - at < HEADER_CHARACTERS else self._give_up(at)
        end += len(self._format.header_end)
        header = self._format.header.fullmatch(text, at, end)
        if header is None or header.group(1) not in self._names:
            return self._give_up(at)
        start = skip_space(text, end)
        if start == len(text):
            return at if start - at < HEADER_CHARACTERS else self._give_up(at)
        if text[start] != "{":
            return self._give_up(at)
        self._begin(header.group(1))
        self._arguments, self._mode = ValueEnd(), self._inside_arguments
        return start

    def _inside_arguments(self, text: str, at: int) -> int:
        end = self._arguments.scan(text, at)
        self._call(None, text[at:end])
        if self._arguments.done:
            self._mode = self._after_call
        return end

    def _begin(self, name: str) -> None:
        self._pending.clear()
        self._has_started = True
        self.num_calls += 1
        self._call(name, "")

    def _after_element(self, text: str, at: int) -> int:
        """Between the calls of a list, or after the last."""
        end = skip_space(text, at)
        if end == len(text):
            return end
        if text[end] == ",":
            self._pending.append(",")
            self._has_started, self._object, self._mode = False, CallObject(), self._inside_object
            return end + 1
        self._mode = self._outside
        return end + 1 if text[end] == "]" else end

    def _after_call(self, text: str, at: int) -> int:
        """The closer, if the format has one and the model wrote it."""
        end = skip_space(text, at)
        closer = self._format.closer
        for literal in (closer, *self._format.between):
            literal = literal.lstrip()
            if literal and text.startswith(literal, end):
                if literal == closer:
                    self._mode = self._outside
                return end + len(literal)
            if literal.startswith(text[end:]) and literal:
                return end if end > at else at
        self._mode = self._outside
        return end

    def _give_up(self, at: int) -> int:
        """No call: the text in `_held` is content, and so is all up to the next opener."""
        self._content("".join(self._pending))
        self._pending.clear()
        self._mode = self._inside_content
        return at


def overlap(text: str, literal: str, at: int = 0) -> int:
    """Length of the longest end of text[at:] that is a beginning of `literal`, and shorter than it."""
    longest = min(len(text) - at, len(literal) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(literal[:n])), 0)
