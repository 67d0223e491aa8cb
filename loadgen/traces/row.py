"""One recorded request of any form of file, and the interface of a form."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.errors import ScenarioError


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. A form without a field leaves its default."""

    offset_s: float | None = None  # from the first request of the trace; None where the form has no times
    prompt_tokens: int = 0
    output_tokens: int | None = None  # None: not recorded
    hash_ids: tuple[int, ...] = ()  # equal ids at equal positions, after equal ones, stand for equal tokens
    block_tokens: int = 0  # that one of the ids stands for
    klass: str = ""
    session_id: str = ""  # a name for the records: each row is an arrival of its own
    content: str = ""  # JSON of the recorded text (a string) or messages (a list)


@dataclass(slots=True)
class Tally:
    """Rows without a request that could be sent: how many were left out, by reason."""

    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Window:
    """A window in seconds from the first request of a trace, and the seed of draws."""

    start_s: float = 0.0
    end_s: float = float("inf")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, which decides its form."""

    path: Path
    first_line: str
    first_object: dict | None  # the first line as a JSON object, where it is one


@dataclass(frozen=True, slots=True)
class TraceForm:
    """One form of file. `rows` yields rows with times on the trace's own clock, in any order; raises ScenarioError."""

    name: str
    looks_like: str
    recognises: Callable[[Head], bool]
    rows: Callable[[Path, Window, Tally], Iterator[TraceRow]]
    block_tokens: int = 0  # that one of its hash ids stands for; 0 where it has none


def bad_line(path: Path, number: int, reason: str) -> ScenarioError:
    return ScenarioError(f"{path.name} line {number}: {reason}")
