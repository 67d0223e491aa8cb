"""A load to size a server for: lengths, moments and what prompts share, without a token of text."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sojourn.engine.memory.prefix import chain_hash
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.recorded import recorded_load

Segment = tuple[object, int]  # a part of a prompt that others may have, by its name; its tokens


@dataclass(frozen=True, slots=True)
class SizedLoad:
    """Requests in order, as arrays [requests]. A request that `follows` another one, by place, has no moment: it is due
    `pause_s` after that has ended."""

    name: str
    klass: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    offset_s: np.ndarray  # from the first one, at the load's own rate; NaN where it follows
    follows: np.ndarray  # -1: none
    pause_s: np.ndarray
    paths: Sequence[Sequence[Segment]] = ()  # of each prompt and answer; (): nothing is shared
    token_ids: Sequence[Sequence[int]] = ()  # in place of paths, of each prompt and answer
    slots: int | None = None  # of a closed loop, which has no rate
    has_own_rate: bool = True  # False: its moments are there to be stretched
    _hashes: dict[int, "PathHashes"] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def rate_rps(self) -> float:
        """Requests per second, those that follow others included; NaN where all come at the same moment."""
        begins = self.offset_s[~np.isnan(self.offset_s)]
        span_s = float(begins.max() - begins.min())
        count = len(begins)
        return len(self) * (count - 1) / count / span_s if span_s > 0 else float("nan")

    @property
    def mean_prompt(self) -> float:
        return float(self.prompt_tokens.mean())

    @property
    def mean_output(self) -> float:
        return float(self.output_tokens.mean())

    def with_one_token(self) -> "SizedLoad":
        """The same prompts, each answered with one token."""
        return replace(self, output_tokens=np.ones_like(self.output_tokens), _hashes={})

    def scaled(self, prompt_tokens: float | None, output_tokens: float | None) -> "SizedLoad":
        """The same with other mean lengths; None leaves them."""
        prompts, outputs = self.prompt_tokens, self.output_tokens
        if prompt_tokens is not None:
            prompts = np.maximum(1, np.rint(prompts * prompt_tokens / self.mean_prompt)).astype(int)
        if output_tokens is not None:
            outputs = np.maximum(1, np.rint(outputs * output_tokens / self.mean_output)).astype(int)
        return replace(self, prompt_tokens=prompts, output_tokens=outputs, _hashes={})

    def first(self, count: int) -> "SizedLoad":
        """The first `count` requests at least, with all that follow them."""
        return self._cut(np.arange(len(self)), count)

    def heads(self, count: int) -> "SizedLoad":
        """The first `count` requests that follow none, with all that follow them."""
        return self._cut(np.cumsum(self.follows < 0) - 1, count)

    def _cut(self, numbers: np.ndarray, count: int) -> "SizedLoad":
        """The requests whose number, or that of the one that begins their session, is below `count`."""
        heads = numbers.copy()
        for place in np.flatnonzero(self.follows >= 0).tolist():
            heads[place] = heads[self.follows[place]]
        kept = int(np.flatnonzero(heads < count).max()) + 1
        if kept == len(self):
            return self
        return SizedLoad(
            name=self.name, klass=self.klass[:kept], prompt_tokens=self.prompt_tokens[:kept],
            output_tokens=self.output_tokens[:kept], offset_s=self.offset_s[:kept], follows=self.follows[:kept],
            pause_s=self.pause_s[:kept], paths=self.paths[:kept], token_ids=self.token_ids[:kept], slots=self.slots,
            has_own_rate=self.has_own_rate,
        )  # fmt: skip

    def due_s(self, rate_rps: float) -> np.ndarray:
        """The moment of each request at a rate of all. A session's later turns come their pauses after its begin, as if
        answers took no time; what lies behind the last begin comes at the beginning, so that the rate is even: turns of
        sessions that began before."""
        factor = self.rate_rps / rate_rps
        moments = self.offset_s * factor
        for place in np.flatnonzero(self.follows >= 0).tolist():
            moments[place] = moments[self.follows[place]] + self.pause_s[place]
        if not (self.follows >= 0).any():
            return moments
        return moments % (len(self) / rate_rps)

    def hashes(self, block_size: int) -> "PathHashes | None":
        """Of the blocks of each request; None where nothing is shared."""
        if not self.paths and not self.token_ids:
            return None
        return self._hashes.setdefault(block_size, PathHashes(self, block_size))


def recorded_load_of(run: RunDirectory) -> SizedLoad:
    """The measured requests of a run, as they were sent: its warm-up is left out. Raises ReplayError."""
    found = recorded_load(run, run.requests(), run.meta())
    kept = [place for place, each in enumerate(found.requests) if each.is_measured and not each.is_prelude]
    if not kept:
        raise ReplayError(f"{run.name} has no measured request, so there is no load to size for")
    places = {place: number for number, place in enumerate(kept)}
    requests = [found.requests[place] for place in kept]
    follows = [-1 if each.follows is None else places.get(each.follows, -1) for each in requests]
    begin_ns = min(each.due_ns for each in requests)
    shares = any(each.shared_tokens for each in requests)
    return SizedLoad(
        name=run.name,
        klass=np.array([each.klass for each in requests], dtype=object),
        prompt_tokens=np.array([each.prompt_tokens for each in requests]),
        output_tokens=np.array([max(1, each.output_tokens) for each in requests]),
        offset_s=np.array([np.nan if before >= 0 else (each.due_ns - begin_ns) / 1e9
                           for each, before in zip(requests, follows, strict=True)]),
        follows=np.array(follows),
        pause_s=np.array([each.pause_ns / 1e9 for each in requests]),
        token_ids=[each.token_ids for each in requests] if shares else (),
        slots=found.slots,
    )  # fmt: skip


def plain_load(prompt_tokens: int, output_tokens: int, count: int, seed: int = 0) -> SizedLoad:
    """Requests of one length that come by chance (Poisson), nothing shared. Raises InputError."""
    if prompt_tokens < 1 or output_tokens < 1:
        raise InputError(f"{prompt_tokens}/{output_tokens}: a prompt and an answer have at least one token")
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return SizedLoad(
        name=f"{prompt_tokens}/{output_tokens}",
        klass=np.full(count, "all", dtype=object),
        prompt_tokens=np.full(count, prompt_tokens),
        output_tokens=np.full(count, output_tokens),
        offset_s=np.cumsum(gaps) - gaps[0],
        follows=np.full(count, -1),
        pause_s=np.zeros(count),
        has_own_rate=False,
    )


class PathHashes:
    """The chain hashes of the blocks that requests fill: equal where all segments up to a block's end are."""

    def __init__(self, load: SizedLoad, block_size: int) -> None:
        self._load, self._size = load, block_size
        self._numbers: dict[object, int] = {}
        self._known: dict[int, list[bytes]] = {}

    def __call__(self, request: int) -> list[bytes]:
        if (known := self._known.get(request)) is None:
            known = self._known[request] = self._of(request)
        return known

    def _of(self, request: int) -> list[bytes]:
        load, size = self._load, self._size
        if load.token_ids:
            return self._of_tokens(load.token_ids[request])
        total = int(load.prompt_tokens[request] + load.output_tokens[request])
        named = [*load.paths[request], (("own", request), total)]
        hashes: list[bytes] = []
        parent, parts, filled, counted = b"", bytearray(), 0, 0
        for name, tokens in named:
            number = self._numbers.setdefault(name, len(self._numbers))
            place, tokens = 0, min(tokens, total - counted)
            counted += tokens
            while place < tokens:
                taken = min(size - filled, tokens - place)
                parts += number.to_bytes(6, "big") + place.to_bytes(4, "big") + taken.to_bytes(4, "big")
                place, filled = place + taken, filled + taken
                if filled == size:
                    parent = hashlib.blake2b(parent + parts, digest_size=16).digest()
                    hashes.append(parent)
                    parts, filled = bytearray(), 0
        return hashes

    def _of_tokens(self, ids: Sequence[int]) -> list[bytes]:
        hashes: list[bytes] = []
        parent = b""
        for begin in range(0, len(ids) - self._size + 1, self._size):
            parent = chain_hash(parent, ids[begin : begin + self._size])
            hashes.append(parent)
        return hashes
