"""A triage on a terminal: at most 25 lines of 80 columns."""

import re
import textwrap
from collections.abc import Sequence

from sojourn.triage.document import Triage

WIDTH, MOST_LINES = 80, 25
# Lines of each part, at most; what a part leaves over goes to none.
HEADLINE, SEEN, CERTAIN, LIKELY, UNKNOWABLE, UNREAD = 2, 4, 7, 6, 4, 3
BETWEEN_FACTS = re.compile(r", (?![^\[({]*[\])}])")  # no comma within brackets
LONGEST_NAME = 40  # of a piece of evidence


def report(found: Triage) -> str:
    lines = _wrapped("", f"{found.state}: {found.headline}")[:HEADLINE]
    each_most = max(1, SEEN // len(found.seen)) if found.seen else SEEN
    lines += _part("", [_seen(each.kind, each.label, each.shows, each_most) for each in found.seen], SEEN)
    lines += _part("not read", found.unread, UNREAD)
    lines += _part("certain", [_with_source(each.sentence, each.source, found) for each in found.certain], CERTAIN)
    lines += _part("likely", [
        f"confidence {each.confidence:.0%}: {each.cause} [{each.level}: {each.evidence}]"
        + (f"; change: {each.change}" if each.change else "")
        + (f"; rival: {each.rivals[0]}" if each.rivals else "")
        for each in found.likely
    ], LIKELY)  # fmt: skip
    lines += _part("unknowable from this", found.unknowable, UNKNOWABLE)
    return "\n".join([*lines[: MOST_LINES - 2], *_wrapped("next: ", found.next)])


def _seen(kind: str, label: str, shows: str, most: int) -> str:
    """Whole facts only, as many as fit into so many lines, and one at least."""
    head, facts = f"{kind}, {label}" if label else kind, BETWEEN_FACTS.split(shows) if shows else []
    for left_out in range(len(facts)):
        kept = facts[: len(facts) - left_out]
        more = f", and {left_out} more" if left_out else ""
        if len(_wrapped("", sentence := f"{head}: {', '.join(kept)}{more}")) <= most:
            return sentence
    return sentence if facts else head


def _with_source(sentence: str, source: str, found: Triage) -> str:
    """With the name of the evidence, where there are several."""
    if len(found.seen) < 2:
        return sentence
    path, space, label = source.partition(" (")  # a label may hold a slash, such as that of a rate
    name = f"{path.rpartition('/')[2]}{space}{label}"
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
