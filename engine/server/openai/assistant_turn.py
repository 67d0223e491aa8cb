"""The turn that the model writes: its content and its calls, as they grow with the pieces of one sequence."""

import uuid
from dataclasses import dataclass, field

from engine.server.core.sequence import TextPiece
from engine.server.openai.tools import ToolPlan
from engine.token.tools.calls import CallDelta, ContentDelta, Delta, ToolCallParser


@dataclass(slots=True)
class ToolCall:
    """A call, as far as the model has written it."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class AssistantTurn:
    """Grows with the pieces of one sequence. Without a plan all of it is content."""

    def __init__(self, plan: ToolPlan | None):
        self.calls: list[ToolCall] = []
        self._plan = plan
        self._parser = ToolCallParser(plan.format, plan.names) if plan is not None else None
        self._content: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    def add(self, piece: TextPiece) -> list[Delta]:
        """What the piece adds, in order."""
        if self._parser is None:
            deltas = [ContentDelta(piece.text)] if piece.text else []
        else:
            deltas = self._parser.push(piece.text)
            if piece.finish_reason is not None:
                deltas += self._parser.finish()
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            else:
                self._grow(delta)
        return deltas

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as the API says it: a model that stops after a call has stopped for the call."""
        return "tool_calls" if reason == "stop" and self.calls else reason

    def _grow(self, delta: CallDelta) -> None:
        if delta.name is not None:
            # Mistral's templates take back nothing but nine letters and digits.
            short = self._plan.format.opener == "[TOOL_CALLS]"
            self.calls.append(ToolCall(uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}", delta.name))
        self.calls[delta.index].parts.append(delta.arguments)
