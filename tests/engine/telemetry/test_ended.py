"""What the front is told of a request that ended."""

from struct import unpack

from sojourn.engine.memory.prefix import chain_hash
from sojourn.engine.request.request import Request
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.telemetry.ended import ended_message

SIZE = 4


def request(tokens: int) -> Request:
    return Request(0, "r", tokens, list(range(tokens)), SamplingParams(max_tokens=2))


def test_a_prompt_that_ends_in_the_queue_still_tells_what_it_would_have_shared():
    waiting = request(11)
    hashes = ended_message(waiting, 0, SIZE).prompt_block_hashes
    first = chain_hash(waiting.root_hash, [0, 1, 2, 3])
    chain = [first, chain_hash(first, [4, 5, 6, 7])]
    assert hashes == [unpack(">q8x", key)[0] for key in chain]
    assert hashes == ended_message(request(12), 0, SIZE).prompt_block_hashes  # the last position is always computed


def test_a_prompt_that_was_scheduled_tells_what_its_lookup_worked_out():
    scheduled = request(11)
    scheduled.counts.first_step = 3
    assert ended_message(scheduled, 0, SIZE).prompt_block_hashes == []
    scheduled.block_hashes(SIZE, 1)
    assert len(ended_message(scheduled, 0, SIZE).prompt_block_hashes) == 1
