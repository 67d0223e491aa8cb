"""Runs the real engine in this process, one step after another, and keeps what it publishes."""

import asyncio
import time
from pathlib import Path

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.loop.engine import Engine
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.server.core.sequence import DecodeSpans, SequenceStream
from sojourn.engine.techniques.handover.handoffs import Handoffs
from sojourn.engine.token.text.assembler import TextAssembler
from sojourn.engine.token.text.tokenizer import NoText
from tests.engine.memory.audits import audit_pool
from tests.engine.published import Published


def make_engine(folder: Path | str, **settings) -> tuple[Engine, Published]:
    published = Published()
    defaults = {"threads": 1, "dtype": "float32", "num_kv_blocks": 256, "max_model_len": 512}
    engine, _ = build(EngineConfig(model=str(folder), **(defaults | settings)), 0, published.take)
    return engine, published


def submit(request_id: str, prompt: list[int], max_tokens: int = 12, **sampling) -> messages.Submit:
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0, "ignore_eos": True} | sampling))
    return messages.Submit(request_id, prompt, params, encoded_ns=time.monotonic_ns())


def stream_of(request: messages.Submit) -> SequenceStream:
    """The front's side of a request, without a text."""
    return SequenceStream(request, TextAssembler(NoText()), asyncio.Event(), DecodeSpans())


def handoffs_of(engine: Engine) -> Handoffs:
    """Of a prefill server."""
    return engine.scheduler.technique("handover").handoffs


def hand_over(engine: Engine, messages: list[messages.Submit | messages.Abort]) -> None:
    engine.receive(messages, time.monotonic_ns())


def drain(engine: Engine, check: bool = False) -> None:
    """Steps until nothing is left to do; with `check`, the block pool's invariants after every step."""
    while engine.has_work or engine.is_preparing:
        if not engine.has_work:
            engine.flush()
            time.sleep(0.001)  # a grammar is being compiled
        engine.receive([], engine.step() if engine.has_work else time.monotonic_ns())
        if check:
            live = engine.scheduler.requests.values()
            audit_pool(engine.scheduler.pool, [r.blocks for r in live], [r.num_committed_tokens for r in live])
    engine.flush()


def generate(folder: Path | str, prompts: list[list[int]], max_tokens: int = 12, sampling=None, **settings):
    """Greedy tokens (or as `sampling` says) of all prompts at once."""
    engine, published = make_engine(folder, **settings)
    batch = [submit(f"r{i}", p, max_tokens, **(sampling or {})) for i, p in enumerate(prompts)]
    hand_over(engine, batch)
    drain(engine, check=True)
    return [published.tokens[f"r{i}"] for i in range(len(prompts))], published
