"""What a reader is told of replies that count their tokens in no way, or beyond what was asked."""

from types import SimpleNamespace

import pytest

from sojourn.loadgen.record.reply_notes import ReplyNotes
from sojourn.loadgen.replies.usage import counted

SIX = [4] * 6  # bytes of the chunks of text


def notes(told, last, *, max_tokens=6, status="ok") -> list[str]:
    found = ReplyNotes()
    for _ in range(3):
        reply = SimpleNamespace(tokens=counted(told, last, SIX), chunk_ns=list(range(len(SIX))), front=None)
        request = SimpleNamespace(ignore_eos=False, max_tokens=max_tokens)
        found.add(request, SimpleNamespace(status=status), reply)
    return found.sentences()


@pytest.mark.parametrize(
    ("told", "last", "words"),
    [
        ([None] * 6, None, "3 of 3 replies bring no usage: each chunk of text counts as one token"),
        ([None] * 6, 0, "usage counts no output token beside text"),
        ([0] * 6, None, "usage counts no output token beside text"),
        ([0] * 6, 0, "usage counts no output token beside text"),
        ([None] * 6, 80, "3 of 3 answers have more tokens by the server's usage"),
        ([10, 20, 30, 40, 50, 60], 60, "180 for 18"),
    ],
)  # fmt: skip
def test_a_count_that_cannot_be_is_told(told, last, words):
    assert any(words in sentence for sentence in notes(told, last))
    assert notes(told, last, status="error") == []


def test_nothing_is_told_of_counts_that_are_right():
    assert notes([None] * 6, 6) == notes([1, 2, 3, 4, 5, 6], 6) == []
