"""Messages that are lost, asked for, repeated, and of a publisher that began anew: what is read is what was sent."""

from random import Random

import msgspec
import pytest

from sojourn.live.kv_lens.sequence import MessageSequence
from tests.further import further


def payload(number: int) -> bytes:
    return msgspec.msgpack.encode([1.0, [["BlockStored", [number], None, [7], 16, None, "GPU"]], 0])


def sequence(can_ask: bool) -> MessageSequence:
    return MessageSequence("s", lambda seconds: int(seconds * 1e9), can_ask)


def blocks(events) -> list:
    """What was read: block hashes, and the other kinds of events by name."""
    return [event.hashes[0] if event.kind == "stored" else (event.kind, event.lost) for event in events]


def answer(reader: MessageSequence, sent: int, buffered: int) -> list:
    """As a publisher answers that holds so many of the messages it has sent."""
    begin = reader.ask_from
    reader.ask_from = None
    found = []
    for number in range(max(begin, sent - buffered), sent):
        found += reader.answer(number, payload(number), 0)
    return found + reader.answered(0)


@pytest.mark.parametrize("buffered", [1000, 20])
@pytest.mark.parametrize("seed", [0, *further(1, 2, 3, 4)])
def test_with_answers_everything_is_read_in_order(seed, buffered):
    dice, reader, found = Random(seed), sequence(can_ask=True), []
    found += answer(reader, 0, buffered)
    for number in range(300):
        if dice.random() < 0.1:
            continue  # lost on its way
        found += reader.message(number, payload(number), 0)
        if reader.ask_from is not None and dice.random() < 0.5:  # others may come before the answer does
            found += answer(reader, number + 1, buffered)
    if reader.is_asking:
        reader.ask_from = 0 if reader.ask_from is None else reader.ask_from
        found += answer(reader, 300, buffered)
    read = [each for each in blocks(found) if isinstance(each, int)]
    assert read == sorted(set(read)), "twice, or out of order"
    assert len(read) + reader.lost >= 299 and (reader.lost == 0 or buffered == 20)
    assert sum(event.lost for event in found) == reader.lost


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_without_answers_what_is_missing_is_counted(seed):
    dice, reader, found, missed = Random(seed), sequence(can_ask=False), [], 0
    for number in range(200):
        if number and dice.random() < 0.1:
            missed += 1
            continue
        found += reader.message(number, payload(number), 0)
    last = max(each for each in blocks(found) if isinstance(each, int))
    assert reader.lost == missed - (199 - last) and reader.begin == 0 and not reader.is_asking
    assert len([each for each in blocks(found) if isinstance(each, int)]) == reader.messages == 200 - missed


def test_history_is_asked_for_first_and_what_is_published_meanwhile_waits():
    reader = sequence(can_ask=True)
    assert reader.ask_from == 0 and reader.message(5, payload(5), 0) == []
    assert blocks(answer(reader, 5, 3)) == [2, 3, 4, 5]
    assert reader.begin == 2 and reader.lost == 0 and not reader.is_whole


def test_an_answer_that_does_not_come_is_given_up():
    reader = sequence(can_ask=True)
    reader.message(5, payload(5), 0)
    reader.message(6, payload(6), 0)
    assert blocks(reader.answered(0, in_time=False)) == [5, 6]
    assert reader.unanswered and reader.begin == 5
    assert blocks(reader.message(9, payload(9), 0)) == [] and reader.ask_from == 7
    assert blocks(reader.answered(0, in_time=False)) == [("lost", 2), 9] and reader.lost == 2


@pytest.mark.parametrize("can_ask", [True, False])
def test_numbers_that_begin_anew_are_a_server_that_began_anew(can_ask):
    reader = sequence(can_ask)
    found = answer(reader, 0, 9) if can_ask else []
    for number in (0, 1, 2, 0, 1):
        found += reader.message(number, payload(number), 0)
    assert blocks(found) == [0, 1, 2, ("cleared", 0), 0, 1] and reader.restarts == 1 and reader.lost == 0


def test_a_restart_while_an_answer_is_awaited():
    reader = sequence(can_ask=True)
    found = answer(reader, 0, 9) + reader.message(0, payload(0), 0) + reader.message(3, payload(3), 0)
    found += reader.message(0, payload(0), 0)
    reader.ask_from = None
    for number in (1, 2):
        found += reader.answer(number, payload(number), 0)
    found += reader.answered(0)
    assert blocks(found) == [0, 1, 2, 3, ("cleared", 0), 0]


def test_a_message_that_cannot_be_read_is_one_that_is_lost():
    reader = sequence(can_ask=False)
    found = [*reader.message(0, payload(0), 0), *reader.message(1, b"GET /", 0), *reader.message(2, payload(2), 0)]
    assert blocks(found) == [0, ("lost", 1), 2] and reader.malformed == 1 and reader.last_fault


def test_messages_that_wait_are_bounded():
    reader = sequence(can_ask=True)
    big = payload(0) + b"\x00" * (100 << 20)
    for number in range(5):
        assert reader.message(number, big, 0) == []
    assert len(reader._waiting) == 2
