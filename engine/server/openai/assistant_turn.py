"""The turn that the model writes: its reasoning, content and calls, as they grow with the pieces of one sequence."""

import uuid
from dataclasses import dataclass, field

from sojourn.engine.server.core.sequence import SequenceStream, TextPiece
from sojourn.engine.server.openai.reasoning import TurnPlan
from sojourn.engine.token.text.reasoning import ReasoningParser
from sojourn.engine.token.tools.calls import CallDelta, ContentDelta, Delta, ToolCallParser


@dataclass(slots=True)
class ToolCall:
    """A call, as far as the model has written it."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Text that stands before the answer."""

    text: str


TurnDelta = ReasoningDelta | Delta


class AssistantTurn:
    """Grows with the pieces of one sequence. Stop strings end its text wherever they stand, also in the reasoning."""

    def __init__(self, plan: TurnPlan, call_prefix: str = "call_"):
        """`call_prefix` begins the ids of calls."""
        self._call_prefix = call_prefix
        self.calls: list[ToolCall] = []
        self._tools = plan.tools
        self._calls = ToolCallParser(plan.tools.format, plan.tools.names) if plan.tools is not None else None
        self._thoughts = ReasoningParser(plan.reasoning) if plan.reasoning is not None else None
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def reasoning_end(self) -> int:
        """Characters of the text before its answer."""
        return self._thoughts.end if self._thoughts is not None else 0

    def reasoning_tokens(self, sequence: SequenceStream) -> int:
        """Tokens of the reasoning and its markers, of the sequence whose pieces were added."""
        return self._thoughts.tokens(sequence.token_offsets) if self._thoughts is not None else 0

    def add(self, piece: TextPiece) -> list[TurnDelta]:
        """What the piece adds, in order."""
        ends = piece.finish_reason is not None
        reasoning, text = self._split(piece.text, ends=ends)
        deltas: list[TurnDelta] = [ReasoningDelta(reasoning)] if reasoning else []
        if self._calls is None:
            deltas += [ContentDelta(text)] if text else []
        else:
            deltas += self._calls.push(text)
            if ends:
                deltas += self._calls.finish()
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            elif isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            else:
                self._grow(delta)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as the API says it: a model that stops after a call has stopped for the call."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _split(self, text: str, *, ends: bool) -> tuple[str, str]:
        """Into reasoning and the rest."""
        if self._thoughts is None:
            return "", text
        reasoning, answer = self._thoughts.push(text)
        if ends:
            last_reasoning, last_answer = self._thoughts.finish()
            reasoning, answer = reasoning + last_reasoning, answer + last_answer
        return reasoning, answer

    def _grow(self, delta: CallDelta) -> None:
        if delta.name is not None:
            # Mistral's templates take back nothing but nine letters and digits.
            short = self._tools.format.opener == "[TOOL_CALLS]"
            call_id = uuid.uuid4().hex[:9] if short else f"{self._call_prefix}{uuid.uuid4().hex[:24]}"
            self.calls.append(ToolCall(call_id, delta.name))
        self.calls[delta.index].parts.append(delta.arguments)
