"""The grammars of live requests: compiled before their requests may be scheduled, masked while the device computes."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from sojourn.engine.sampling import contradiction
from sojourn.engine.techniques.grammar.grammar import GrammarCompiler, GrammarError, Guide
from sojourn.engine.techniques.grammar.masks import MaskFill
from sojourn.engine.token.checkpoint import has_tokenizer
from sojourn.engine.token.sampling.state import SamplingRequest
from sojourn.metrics.errors import ModelError

COMPILER_THREADS = 2


@dataclass(slots=True)
class GrammarPreparation:
    """A grammar on its way. `ready_ns` and `error` count once it is done."""

    waits_for: ClassVar[str] = "grammar"
    adapter_ready_ns: ClassVar[int | None] = None

    ready_ns: int = 0
    error: str | None = None
    guide: Guide | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self) -> None:
        self.ready_ns = time.monotonic_ns()
        self._done.set()


class Guides:
    """Owns the guide of each live request that has a grammar, and the threads that work on them."""

    def __init__(self, folder: Path, vocab_size: int):
        cores = os.cpu_count() or 1
        self._folder, self._vocab_size = folder, vocab_size
        self._compiling = ThreadPoolExecutor(COMPILER_THREADS, thread_name_prefix="grammar")
        self._compiler: Future[GrammarCompiler] | None = None
        self._mask_threads = max(1, min(4, cores // 2))
        self._masking = self._mask_pool()
        self._live: dict[str, GrammarPreparation] = {}
        if has_tokenizer(folder):  # the first grammar shall not wait for it
            self._compiler = self._compiling.submit(GrammarCompiler, folder, vocab_size)

    def begin(self, request: SamplingRequest) -> GrammarPreparation | None:
        """Starts to compile; the request may be scheduled when that is done. None where it has no grammar."""
        if request.sampling.grammar is None:
            return None
        preparation = self._live[request.id] = GrammarPreparation()
        self._compiling.submit(self._prepare, request, preparation)
        return preparation

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def fill(
        self, requests: Sequence[SamplingRequest], drafts: Sequence[tuple[int, ...]]
    ) -> Callable[[], torch.Tensor]:
        """Starts to fill the masks of requests with grammars, each with its drafts; what waits for them gives
        [rows, words] int32. A request has a row for its next token, and one behind each draft."""
        guides = [self._live[request.id].guide for request in requests]
        fill = MaskFill(guides, [request.sampling.stop_token_ids for request in requests], drafts)
        self._start(fill)
        return partial(fill.wait, partial(self._replace_threads, fill))

    def knows(self, request_id: str) -> bool:
        """It is live, and has a grammar."""
        return request_id in self._live

    def may_end(self, request_id: str) -> bool:
        return request_id in self._live and self._live[request_id].guide.may_end

    def advance(self, request: SamplingRequest, token_ids: Sequence[int]) -> tuple[tuple[str, str | None] | None, int]:
        """A request drew tokens: how they end it, if they do (finish reason, and a sentence for error), and how many of
        them count then."""
        guide = self._live[request.id].guide
        consumed = 0
        for token_id in token_ids:
            if guide.error is not None or guide.complete:
                break
            guide.consume(token_id, request.sampling.stop_token_ids)
            consumed += guide.error is None
        if guide.error is not None:
            return ("error", guide.error), consumed
        return (("stop", None) if guide.complete else None), consumed

    def allowed(self, request_id: str, drafts: list[int]) -> list[int]:
        """Those of the drafts, from the first on, that the grammar of the request allows; all where it has none."""
        known = self._live.get(request_id)
        return drafts if known is None else known.guide.allowed(drafts)

    def _start(self, fill: MaskFill) -> None:
        for _ in range(min(self._mask_threads, len(fill.guides))):
            self._masking.submit(fill.work)

    def _replace_threads(self, fill: MaskFill) -> None:
        """A thread is stuck in a mask: it is left to itself, and fresh ones take over."""
        self._masking.shutdown(wait=False)
        self._masking = self._mask_pool()
        self._start(fill)

    def _mask_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._mask_threads, thread_name_prefix="grammar masks")

    def _prepare(self, request: SamplingRequest, preparation: GrammarPreparation) -> None:
        try:
            if self._compiler is None:
                raise ModelError(f"{self._folder} has no tokenizer.json, which structured output needs")
            if (sentence := contradiction(request.sampling)) is not None:
                raise GrammarError(sentence)
            preparation.guide = self._compiler.result().compile(request.sampling.grammar)
        except (GrammarError, ModelError) as error:
            preparation.error = str(error)
        except Exception as error:  # it concerns this request alone
            preparation.error = f"the grammar cannot be compiled: {error!r}"[:300]
        finally:
            preparation.finish()
