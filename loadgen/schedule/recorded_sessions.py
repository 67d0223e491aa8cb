"""Whole sessions of a trace as they are replayed: order, sub-agents and pauses of the file, lengths of the class."""

from collections.abc import Iterator
from itertools import cycle

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.workload import RequestClass
from sojourn.loadgen.traces.reader import find_trace, read_trace
from sojourn.loadgen.traces.row import TraceRow

RecordedSession = list[TraceRow]  # by place; each after those that it waits for


def sessions_of(rows: list[TraceRow]) -> list[RecordedSession]:
    """By name, in order of their first row. Rows of a form that tells no order are left out."""
    found: dict[str, RecordedSession] = {}
    for row in rows:
        if row.after is not None:
            found.setdefault(row.session_id, []).append(row)
    return [sorted(session, key=lambda row: row.place) for session in found.values()]


def shuffled_sessions(klass: RequestClass, rng: np.random.Generator) -> Iterator[RecordedSession]:
    """The sessions of a class's `from_file` in random order, again and again. A session ends where its prompts grow
    above the bounds of the class: what waits for such a request is left out with it. Raises ScenarioError."""
    found = read_trace(find_trace(klass.from_file))
    whole = sessions_of(found.rows)
    if not whole:
        raise ScenarioError(
            f"class {klass.klass} has a recorded session, but {found.path.name} (form {found.form.name}) tells no "
            "order within sessions; take a trace of the form agents or spans"
        )
    _, high = klass.prompt_tokens.bounds
    cut = [rows for session in whole if (rows := _cut(session, lambda row: sent_tokens(row, klass) <= high))]
    if not cut:
        shortest = min(sent_tokens(session[0], klass) for session in whole)
        raise ScenarioError(
            f"from_file {found.path.name} has no session whose first prompt has at most {high} tokens (the shortest "
            f"has {shortest}); raise max_tokens of prompt_tokens in class {klass.klass}, or lower its block_tokens"
        )
    return cycle(cut[place] for place in rng.permutation(len(cut)))


def sent_tokens(row: TraceRow, klass: RequestClass) -> int:
    """Tokens of the prompt as the class sends it."""
    if klass.block_tokens is None or not row.block_tokens:
        return row.prompt_tokens
    return max(1, -(-row.prompt_tokens * klass.block_tokens // row.block_tokens))


def recorded_pause_ns(row: TraceRow, klass: RequestClass) -> int:
    scaled_s = row.pause_s * klass.session.pause_scale
    return round(min(scaled_s, klass.session.longest_pause_s) * 1e9)


def _cut(session: RecordedSession, fits) -> RecordedSession:
    kept: dict[int, TraceRow] = {}
    for row in session:
        if fits(row) and all(place in kept for place in row.after):
            kept[row.place] = row
    return list(kept.values())
