"""What a server of known truth is told to do, and what it says that it did. Data only: the server is `truth_server`."""

import msgspec


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How every reply is timed. A reply has as many tokens as it was asked for (`max_tokens`), 16 by default.

    Chunk j of a reply holds `tokens_per_chunk` tokens, the last one what is left, and is due `ttft_s + j *
    tokens_per_chunk * token_s` after its request was read. `in_step`: it waits for the next step of the server, as in a
    batching engine, which writes to all streams at once; steps begin every `tokens_per_chunk * token_s`.
    """

    ttft_s: float = 0.05
    token_s: float = 0.02
    tokens_per_chunk: int = 1
    in_step: bool = False
    stall_at_s: float = 0.0  # after the first request was read: nothing is accepted, read or written for `stall_s`,
    stall_s: float = 0.0  # and what was due later is late by it, as the server's time stood still
    error_every: int = 0  # each n-th request gets HTTP 500; 0: none
    reset_every: int = 0  # each n-th request's connection is reset after the first half of its chunks; 0: none
    accept_delay_s: float = 0.0  # a new connection is not read before

    def fault(self) -> str | None:
        """Why nothing can be timed like this, in a sentence; None if it can."""
        for name, least in (
            ("ttft_s", 0), ("token_s", 1e-6), ("tokens_per_chunk", 1), ("stall_at_s", 0), ("stall_s", 0),
            ("error_every", 0), ("reset_every", 0), ("accept_delay_s", 0),
        ):  # fmt: skip
            if not getattr(self, name) >= least:
                return f"{name} is {getattr(self, name)}; it must be at least {least}"
        return None


class Answer(msgspec.Struct):
    """One request as the server saw it. Times are of the monotonic clock, which a client on this host shares."""

    request_id: str  # its x-request-id, or one of the server's; also the `id` of every event
    read_ns: int  # when its last byte had been read
    prompt_tokens: int  # words, as a token is a word here
    end: str = "open"  # ok, error (HTTP 500), reset (by the server), gone (the client closed first)
    due_ns: list[int] = []  # of each write of tokens: when it should have begun
    write_ns: list[int] = []  # when it began: no client can have read it before
    tokens: list[int] = []  # how many it held


class TruthLog(msgspec.Struct):
    """What GET /truth tells: everything since the server began."""

    truth: Truth
    answers: list[Answer]
    stalls: list[tuple[int, int]]  # from, to
