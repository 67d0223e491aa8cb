"""Reads the JSON of one tool call while it is still being written: knows where its parts end, not what they mean."""

import json
import re

NAME_CHARACTERS = 64  # longest name of a function, and longest key of a call

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_VALUE = re.compile(r'[^"{}\[\]]*')
_NAME = re.compile(rf'"(?:[^"\\]|\\.){{0,{NAME_CHARACTERS}}}"', re.DOTALL)
_SCALAR = re.compile(rf"[-+.0-9A-Za-z]{{1,{NAME_CHARACTERS}}}(?=[,}}\s])")
_ARGUMENTS = ("arguments", "parameters")


def skip_space(text: str, at: int) -> int:
    """The first position from `at` on that is no JSON white space."""
    return _SPACE.match(text, at).end()


class ValueEnd:
    """Finds the end of an object, list or string that begins at the first character it is shown. Without recursion."""

    def __init__(self):
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, at: int) -> int:
        """Position after the value's last character, or the end of `text` while the value goes on."""
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                at = _IN_STRING.match(text, at).end()
                if at < len(text):
                    self._escaped = self._in_string = text[at] == "\\"
                    self.done = not self._in_string and self._depth == 0
            else:
                at = _IN_VALUE.match(text, at).end()
                if at < len(text):
                    self._structure(text[at])
            at += 1
        return min(at, len(text))

    def _structure(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        else:
            self._depth += 1 if character in "{[" else -1
            self.done = self._depth <= 0


class CallObject:
    """{"name": "…", "arguments": {…}}, piece by piece; keys in any order, `parameters` for arguments, others skipped.

    `state` says what comes next: open, key, colon, value, comma; or that it is done or broken.
    """

    def __init__(self):
        self.state = "open"
        self.name: str | None = None
        self.has_arguments = False
        self._arguments: list[str] = []  # as the model wrote them, not yet taken
        self._key = ""
        self._value: ValueEnd | None = None  # while it is inside one

    def take_arguments(self) -> str:
        """The text of the arguments that came since the last call."""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    def feed(self, text: str, at: int) -> int:
        """Reads on; returns where it stopped: at the end, after the object, at what a call cannot hold, or, with the
        state open, before a name or number of which the end is still to come (at most some 100 characters), and after
        the function's name, which may make it no call, however much text there is."""
        unnamed = self.name is None
        while self.state not in ("done", "broken") and (self.name is None) == unnamed:
            if self._value is None:
                at = skip_space(text, at)
            if at == len(text):
                break
            end = self._go_on(text, at)
            if end == at:
                break
            at = end
        return at

    def _go_on(self, text: str, at: int) -> int:
        if self._value is not None:
            return self._inside_value(text, at)
        if self.state == "value":
            return self._begin_value(text, at)
        if self.state == "key" and text[at] == '"':
            return self._read_name(text, at)
        follows = _FOLLOWS.get((self.state, text[at]), "broken")
        self.state = follows
        return at if follows == "broken" else at + 1

    def _read_name(self, text: str, at: int) -> int:
        """A key, or the function's name: both are short."""
        whole = _NAME.match(text, at)
        if whole is None:
            if len(text) - at > 2 * NAME_CHARACTERS + 2:
                self.state = "broken"
            return at
        try:
            name = json.loads(whole.group(), strict=False)
        except ValueError:
            self.state = "broken"
            return at
        if self.state == "key":
            self._key, self.state = name, "colon"
        else:
            self.name, self.state = name, "comma"
        return whole.end()

    def _begin_value(self, text: str, at: int) -> int:
        character = text[at]
        if self._key == "name":
            if character == '"' and self.name is None:
                return self._read_name(text, at)
            self.state = "broken"
        elif self._key in _ARGUMENTS:
            if character != "{" or self.has_arguments:
                self.state = "broken"
            else:
                self.has_arguments, self._value = True, ValueEnd()
                return self._inside_value(text, at)
        elif character in '{["':
            self._value = ValueEnd()
            return self._inside_value(text, at)
        else:
            scalar = _SCALAR.match(text, at)
            if scalar is not None:
                self.state = "comma"
                return scalar.end()
            if len(text) - at > NAME_CHARACTERS or (not character.isalnum() and character not in "+-."):
                self.state = "broken"
        return at

    def _inside_value(self, text: str, at: int) -> int:
        end = self._value.scan(text, at)
        if self._key in _ARGUMENTS:
            self._arguments.append(text[at:end])
        if self._value.done:
            self._value, self.state = None, "comma"
        return end


# (state, character) → the next state; what is not here breaks the call
_FOLLOWS = {
    ("open", "{"): "key",
    ("colon", ":"): "value",
    ("comma", ","): "key",
    ("comma", "}"): "done",
}
