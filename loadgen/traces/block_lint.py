"""What a trace without text says of its prompts: of blocks what they share as prefixes, of lengths nothing but them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from os.path import commonprefix

from sojourn.loadgen.schedule.ideal_prefix_hits import ideal_hits
from sojourn.loadgen.traces.row import TraceRow
from sojourn.metrics.memory.prompt_lint.lint import ClassReport, LintReport


def lint_blocks(target: str, rows: Sequence[TraceRow], block_tokens: int) -> LintReport:
    """A trace names each block by all that stands before it, too: what stands elsewhere cannot be recognised."""
    return LintReport(
        target=target, block_size=block_tokens, classes=list(_block_classes(rows, block_tokens)), findings=[],
        notes=[
            f"the trace names blocks of {block_tokens} tokens by their whole prefix, so shares are exact in them; "
            "what is shared below a block or at another place, the text and its tokens cannot be known"
        ],
    )  # fmt: skip


def lint_lengths(target: str, form: str, rows: Sequence[TraceRow], block_size: int) -> LintReport:
    sizes: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        sizes[row.klass].append(row.prompt_tokens)
    classes = [
        ClassReport(
            klass=klass, requests=len(tokens), prompt_tokens=sum(tokens), common_prefix_tokens=None,
            shared_share=None, infinite_share=None, movable_share=None,
        )
        for klass, tokens in sizes.items()
    ]  # fmt: skip
    note = f"a trace of the form {form} has lengths only: what its prompts share, and their text, cannot be known"
    return LintReport(target=target, block_size=block_size, classes=classes, findings=[], notes=[note])


def _block_classes(rows: Sequence[TraceRow], block_tokens: int) -> Iterator[ClassReport]:
    hits = ideal_hits(((_segments(row, block_tokens), row.prompt_tokens) for row in rows), block_tokens)
    found: dict[str, list[tuple[TraceRow, int]]] = defaultdict(list)
    for row, hit in zip(rows, hits, strict=True):
        found[row.klass].append((row, hit))
    for klass, members in found.items():
        total = sum(row.prompt_tokens for row, _ in members)
        share = sum(hit for _, hit in members) / max(1, total)
        begins = commonprefix([list(row.hash_ids) for row, _ in members])  # noqa: RUF071 of lists, not of paths
        yield ClassReport(
            klass=klass, requests=len(members), prompt_tokens=total,
            common_prefix_tokens=len(begins) * block_tokens if len(members) > 1 else None,
            shared_share=None, infinite_share=share, movable_share=None, caught={block_tokens: share},
        )  # fmt: skip


def _segments(row: TraceRow, block_tokens: int) -> list[tuple[object, int]]:
    return [
        (block, min(block_tokens, row.prompt_tokens - place * block_tokens)) for place, block in enumerate(row.hash_ids)
    ]
