"""How the reference server times its replies, and its log of what it did. Data only."""

import msgspec


class ReplyTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The timing of every reply. A reply has `max_tokens` tokens, by default 16.

    Chunk j of a reply holds `tokens_per_chunk` tokens (the last chunk: the rest). It is due `ttft_s + j *
    tokens_per_chunk * token_s` after its request was read. `in_step`: it waits for the next step of the server, which
    writes to all streams at once, as a batching engine does; steps begin every `tokens_per_chunk * token_s`.
    """

    ttft_s: float = 0.05
    token_s: float = 0.02
    tokens_per_chunk: int = 1
    in_step: bool = False
    stall_at_s: float = 0.0  # after the first request was read: nothing is accepted, read or written for `stall_s`,
    stall_s: float = 0.0  # and every later due time moves by it, as the server's clock stood still
    error_every: int = 0  # each n-th request gets HTTP 500; 0: none
    reset_every: int = 0  # each n-th request's connection is reset after the first half of its chunks; 0: none
    accept_delay_s: float = 0.0  # a new connection is not read before

    def fault(self) -> str | None:
        """Why no reply can be timed like this, in a sentence; None if it can."""
        least = {"token_s": 1e-6, "tokens_per_chunk": 1}
        for name in self.__struct_fields__:
            if not getattr(self, name) >= least.get(name, 0):
                return f"{name} is {getattr(self, name)}; it must be at least {least.get(name, 0)}"
        return None


class ServedRequest(msgspec.Struct):
    """One request as the server saw it. Times are of the monotonic clock, which a client on this host shares."""

    request_id: str  # its x-request-id, or one of the server's; also the `id` of every event
    read_ns: int  # when its last byte had been read
    prompt_tokens: int  # words, as a token is a word here
    end: str = "open"  # ok, error (HTTP 500), reset (by the server), gone (the client closed first)
    due_ns: list[int] = []  # of each write of tokens: when it should have begun
    write_ns: list[int] = []  # when it began: no client can have read it before
    tokens: list[int] = []  # of each write


class ReferenceLog(msgspec.Struct):
    """The reply to GET /log: everything since the server started."""

    timing: ReplyTiming
    requests: list[ServedRequest]
    stalls: list[tuple[int, int]]  # from, to
