"""The content of a request beside its time and its class: its row of a trace, its blocks or text, its variant."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import numpy as np

from sojourn.loadgen.errors import ScenarioError, nearest
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.scenario.workload import RequestClass
from sojourn.loadgen.schedule.recorded_sessions import RecordedSession, sent_tokens, shuffled_sessions
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.seeds import seeded_rng
from sojourn.loadgen.traces.reader import find_trace, read_trace
from sojourn.loadgen.traces.row import TraceRow


class ContentSource:
    """Owns the rows of each class and the generators of variants and trees: none of them shifts arrivals or lengths."""

    def __init__(self, scenario: Scenario, seed: int):
        self._classes = {klass.klass: klass for klass in scenario.workload.classes}
        self._variant_rng = seeded_rng(seed, "variants")
        self._tree_rng = seeded_rng(seed, "trees")
        self._rows_of = {
            name: shuffled_rows(klass, seeded_rng(seed, "rows", name))
            for name, klass in self._classes.items()
            if klass.from_file is not None and not _is_recorded(klass)
        }
        self._sessions_of = {
            name: shuffled_sessions(klass, seeded_rng(seed, "rows", name))
            for name, klass in self._classes.items()
            if _is_recorded(klass)
        }

    def session_of(self, klass: RequestClass) -> RecordedSession | None:
        """The next recorded session of a class; None where its class draws its sessions, or has none."""
        return next(self._sessions_of[klass.klass]) if klass.klass in self._sessions_of else None

    def class_of(self, row: TraceRow | None) -> RequestClass | None:
        """The class that a row names, None without a name. Raises ScenarioError for an unknown one."""
        if row is None or not row.klass:
            return None
        if row.klass not in self._classes:
            raise ScenarioError(
                f"the trace names class {row.klass!r}, which is none of the workload's ({', '.join(self._classes)})"
                f"{nearest(row.klass, list(self._classes))}"
            )
        return self._classes[row.klass]

    def row_of(self, klass: RequestClass, row: TraceRow | None) -> TraceRow | None:
        """The row of a request of this class, its blocks scaled as the class says, if any."""
        row = next(self._rows_of[klass.klass]) if klass.klass in self._rows_of else row
        if row is None:
            return None
        if klass.output_tokens.distribution == "trace" and row.output_tokens is None:
            raise ScenarioError(
                f"class {klass.klass} takes output_tokens from the trace, but a row has none; add output_tokens "
                "to the file, or take them from another distribution"
            )
        return scaled(row, klass)

    def fill(self, request: ScheduledRequest, klass: RequestClass, row: TraceRow | None) -> ScheduledRequest:
        """The request with its blocks, its text, its path through the tree and its variant."""
        changes = {}
        if klass.prefix_tree is not None:
            tree = klass.prefix_tree
            changes = {"shared_prefix": int(self._tree_rng.integers(tree.branching**tree.depth)),
                       "shared_prefix_tokens": tree.tokens}  # fmt: skip
        if klass.variants is not None:
            weights = np.array([variant.weight for variant in klass.variants])
            changes["variant"] = chosen = int(self._variant_rng.choice(len(weights), p=weights / weights.sum()))
            variant = klass.variants[chosen]
            set_there = {name: getattr(variant, name) for name in ("temperature", "top_k", "top_p")}
            changes |= {name: value for name, value in set_there.items() if value is not None}
        if row is not None and not request.prelude:
            changes |= {"session_id": row.session_id} if row.session_id else {}
            if klass.content == "blocks":
                num_blocks = -(-request.prompt_tokens // row.block_tokens)
                changes |= {"block_ids": row.hash_ids[:num_blocks], "block_tokens": row.block_tokens}
            elif klass.content == "recorded":
                changes |= {"content": _recorded(row, klass)}
        return replace(request, **changes) if changes else request


def _is_recorded(klass: RequestClass) -> bool:
    return klass.session is not None and klass.session.recorded


def shuffled_rows(klass: RequestClass, rng: np.random.Generator) -> Iterator[TraceRow]:
    """The rows of a class's `from_file` in random order, again and again."""
    found = read_trace(find_trace(klass.from_file))
    low, high = klass.prompt_tokens.bounds
    rows = found.rows
    if klass.content == "recorded":  # a text is not cut, so that one too long for the bounds cannot be sent
        rows = [row for row in rows if row.content and low <= row.prompt_tokens <= high]
    if not rows:
        raise ScenarioError(
            f"from_file {found.path.name} has no prompt of {low} to {high} tokens with a text, which class "
            f"{klass.klass} asks for; widen the bounds of its prompt_tokens, or take another content"
        )
    return cycle(rows[place] for place in rng.permutation(len(rows)))


def scaled(row: TraceRow, klass: RequestClass) -> TraceRow:
    """The row with blocks of the class's `block_tokens`: as many of them, the last one as full as it was."""
    if klass.content != "blocks":
        return row
    if not row.block_tokens:
        raise ScenarioError(
            f"class {klass.klass} has content blocks, but its trace has no hash_ids; take a trace with hashes of "
            "blocks (mooncake, bailian), or content: prose"
        )
    size = klass.block_tokens or row.block_tokens
    return replace(row, prompt_tokens=sent_tokens(row, klass), block_tokens=size)


def _recorded(row: TraceRow, klass: RequestClass) -> str:
    low, high = klass.prompt_tokens.bounds
    if not row.content:
        raise ScenarioError(
            f"class {klass.klass} has content recorded, but a row of its trace has no text; give prompt or messages "
            "in every row, or take content: prose"
        )
    if not low <= row.prompt_tokens <= high:
        raise ScenarioError(
            f"class {klass.klass} sends recorded text of {low} to {high} tokens, but a row has {row.prompt_tokens}; "
            "widen the bounds of prompt_tokens"
        )
    return row.content
