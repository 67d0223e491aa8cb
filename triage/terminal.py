"""A triage on a terminal: at most 25 lines of 80 columns."""

import textwrap
from collections.abc import Sequence

from sojourn.triage.document import Triage

WIDTH, MOST_LINES = 80, 25
# Lines of each part, at most; what a part leaves over goes to none.
HEADLINE, SEEN, CERTAIN, LIKELY, UNKNOWABLE, UNREAD = 2, 3, 7, 6, 4, 3
LONGEST_NAME = 40  # of a piece of evidence


def report(found: Triage) -> str:
    lines = _wrapped("", f"{found.state}: {found.headline}")[:HEADLINE]
    lines += _part("", [_seen(each.kind, each.label, each.shows) for each in found.seen], SEEN)
    lines += _part("not read", found.unread, UNREAD)
    lines += _part("certain", [_with_source(each.sentence, each.source, found) for each in found.certain], CERTAIN)
    lines += _part("likely", [
        f"{each.confidence:.0%} {each.cause} [{each.level}: {each.evidence}]"
        + (f"; rival: {each.rivals[0]}" if each.rivals else "")
        for each in found.likely
    ], LIKELY)  # fmt: skip
    lines += _part("unknowable from this", found.unknowable, UNKNOWABLE)
    return "\n".join([*lines[: MOST_LINES - 2], *_wrapped("next: ", found.next)])


def _seen(kind: str, label: str, shows: str) -> str:
    return ": ".join(filter(None, [f"{kind}, {label}" if label else kind, shows]))


def _with_source(sentence: str, source: str, found: Triage) -> str:
    """With the name of the evidence, where there are several."""
    if len(found.seen) < 2:
        return sentence
    name = source.rpartition("/")[2]
    return f"{sentence} [{name if len(name) <= LONGEST_NAME else '…' + name[1 - LONGEST_NAME :]}]"


def _part(title: str, sentences: Sequence[str], most: int) -> list[str]:
    """A title and as many whole sentences as fit."""
    if not sentences:
        return []
    lines = [title] if title else []
    for place, sentence in enumerate(sentences):
        wrapped = _wrapped("  • " if title else "", sentence)
        rest = len(sentences) - place
        if place and len(lines) + len(wrapped) > most - (rest > 1):
            return [*lines, f"  … {rest} more with --json"]
        lines += wrapped[: most - bool(title)]
    return lines


def _wrapped(mark: str, sentence: str) -> list[str]:
    return textwrap.wrap(
        sentence, WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False
    )
