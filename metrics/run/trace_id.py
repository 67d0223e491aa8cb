"""The trace of a request whose client sends a `traceparent`: made of its id, so that spans lead back to it."""

from hashlib import sha256


def trace_id_of(request_id: str) -> str:
    """32 hexadecimal digits."""
    return sha256(request_id.encode()).hexdigest()[:32]


def traceparent_of(request_id: str) -> str:
    """The header of W3C Trace Context. Its flag says sampled: the server is to keep the trace."""
    digest = sha256(request_id.encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"
