"""What the front is told of a request that ended."""

from collections.abc import Sequence
from struct import unpack

from sojourn.engine.messages import Ended
from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Technique


def ended_message(request: Request, booked_ns: int, block_size: int, techniques: Sequence[Technique] = ()) -> Ended:
    """What the record of a request needs; its ledger is booked until `booked_ns`.

    The hashes of a prompt are worked out for its lookup. One that ends before it, in the queue, gets them here: what it
    would have shared is not lost with it.
    """
    if request.counts.first_step is None:
        request.reusable_hashes(block_size)
    hashes = _hashes(request)
    reusable = (request.prompt_tokens - 1) // block_size
    return Ended(
        request_id=request.id,
        reason=request.finish_reason or "abort",
        cached_tokens=request.counts.cached_tokens,
        computed_tokens=request.counts.computed_tokens,
        recomputed_tokens=request.counts.recomputed_tokens,
        preemptions=request.counts.preemptions,
        rejected_ns=request.booking.rejected_ns,
        first_step=request.counts.first_step,
        last_step=request.counts.last_step,
        queued_ns=request.booking.queued_ns,
        scheduled_ns=request.booking.scheduled_ns,
        booked_ns=booked_ns,
        ledger=request.booking.ledger,
        waits=request.booking.waits,
        error=request.error,
        is_peer_error=request.is_peer_error,
        prefix=request.parts.get("prefix"),
        prompt_block_hashes=hashes[:reusable] if request.fork_of is None else [],
        output_block_hashes=hashes[reusable:],
        **{name: value for technique in techniques for name, value in technique.report(request).items()},
    )


def _hashes(request: Request) -> list[int]:
    """The first 64 bits of the chain hashes of its blocks, as far as they were worked out."""
    keys = request.known_hashes
    return list(unpack(">" + "q8x" * len(keys), b"".join(keys)))
