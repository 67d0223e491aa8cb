"""What the front is told of a request that ended."""

from struct import unpack

from sojourn.engine.messages import Ended
from sojourn.engine.request.request import Request


def ended_message(request: Request, booked_ns: int, block_size: int) -> Ended:
    """What the record of a request needs; its ledger is booked until `booked_ns`.

    The hashes of a prompt are worked out for its lookup. One that ends before it, in the queue, gets them here: what it
    would have shared is not lost with it.
    """
    if request.first_step is None:
        request.reusable_hashes(block_size)
    hashes = _hashes(request)
    reusable = (request.prompt_tokens - 1) // block_size
    return Ended(
        request_id=request.id,
        reason=request.finish_reason or "abort",
        cached_tokens=request.cached_tokens,
        computed_tokens=request.computed_tokens,
        recomputed_tokens=request.recomputed_tokens,
        preemptions=request.preemptions,
        drafted_tokens=request.drafted_tokens,
        accepted_tokens=request.accepted_tokens,
        rejected_ns=request.rejected_ns,
        lookup_steps=request.lookup_steps,
        first_step=request.first_step,
        last_step=request.last_step,
        queued_ns=request.queued_ns,
        scheduled_ns=request.scheduled_ns,
        booked_ns=booked_ns,
        ledger=request.ledger,
        waits=request.waits,
        error=request.error,
        is_peer_error=request.is_peer_error,
        kv_source=request.kv_source if request.hands_over else None,
        adapter_loads=request.adapter_loads,
        prefix=request.prefix_report,
        kv_load=request.kv_load,
        prompt_block_hashes=hashes[:reusable] if request.fork_of is None else [],
        output_block_hashes=hashes[reusable:],
    )


def _hashes(request: Request) -> list[int]:
    """The first 64 bits of the chain hashes of its blocks, as far as they were worked out."""
    keys = request.known_hashes
    return list(unpack(">" + "q8x" * len(keys), b"".join(keys)))
