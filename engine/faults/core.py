"""Faults of the core process, wrapped around the real scheduler and runner."""

import os
import random
import time
from collections.abc import Callable
from typing import Any

from sojourn.engine.faults.delay import SECOND_NS, Window, after, before, spend
from sojourn.engine.faults.plan import (
    BadDrafts,
    BlockLeak,
    CoreDeath,
    CoreFault,
    Fault,
    RankFault,
    SlowAttention,
    SlowDevice,
    SlowHost,
    SlowKvDisk,
    SlowLink,
    SlowRank,
    SlowSampler,
)
from sojourn.engine.faults.rank import plant_in_rank
from sojourn.engine.loop.engine import Engine
from sojourn.engine.memory.window import HOLE
from sojourn.metrics.errors import ModelError

DEATH_EXIT_CODE = 86


def plant_in_core(engine: Engine, faults: list[Fault], *, on_gpu: bool = False) -> None:
    """Wraps the engine's parts. Raises ModelError for a fault that this device cannot have."""
    for fault in faults:
        if not isinstance(fault, CoreFault):
            continue
        if on_gpu and isinstance(fault, SlowDevice | SlowAttention | SlowSampler | SlowLink | SlowRank):
            raise ModelError(
                f"the fault {type(fault).__name__} is planted on a CPU only, as a GPU does not wait for the host; "
                "use --device cpu, or leave it out"
            )
        if isinstance(fault, RankFault):
            plant_in_rank(engine.runner.inner, [fault])
        else:
            PLANTS[type(fault)](engine, fault)


def slow_host(engine: Engine, fault: SlowHost) -> None:
    window = Window(fault)

    def cost(*_: Any) -> None:
        if window.is_open():
            spend(fault.ms / 1e3, fault.by)

    owner, name = {
        "schedule": (engine.scheduler, "schedule"),
        "prepare": (engine.runner.inner, "prepare"),
        "commit": (engine.scheduler, "commit"),
    }[fault.stage]
    setattr(owner, name, before(getattr(owner, name), cost))


def slow_sampler(engine: Engine, fault: SlowSampler) -> None:
    sampler, window = engine.runner.inner.sampler, Window(fault)

    def cost(logits: Any, *_: Any, **__: Any) -> None:
        if window.is_open():
            spend(fault.ms / 1e3 + len(logits) * fault.us_per_row / 1e6, fault.by)

    sampler.sample = before(sampler.sample, cost)


def slow_device(engine: Engine, fault: SlowDevice, clock: Callable[[], float] = time.monotonic) -> None:
    """Stretches the forward pass by its own duration, so that a large step loses more than a small one."""
    eager, window = engine.runner.inner.eager, Window(fault)
    forward = eager.forward

    def slowed(batch: Any, step: Any) -> Any:
        is_hit = window.is_open()
        if fault.steps != "all":
            has_prompts = any(item.kind not in ("decode", "verify") for item in batch.items)
            is_hit &= has_prompts == (fault.steps == "prompts")
        begin = clock()
        result = forward(batch, step)
        if is_hit:
            spend((fault.factor - 1) * (clock() - begin), fault.by)
        return result

    eager.forward = slowed


def slow_attention(engine: Engine, fault: SlowAttention) -> None:
    """Layers that one call computes as a whole have no attention to repeat: they are computed part by part."""
    eager, window = engine.runner.inner.eager, Window(fault)
    attention, attend = eager.attention, eager.attention.attend
    eager.model.joined = lambda *_: None

    def repeated(*arguments: Any) -> Any:
        if window.is_open():
            for _ in range(fault.times - 1):
                attend(*arguments)
        return attend(*arguments)

    attention.attend = repeated


def block_leak(engine: Engine, fault: BlockLeak) -> None:
    """An ended request's blocks keep a reader that never lets go."""
    scheduler, window = engine.scheduler, Window(fault)
    pool, finish = scheduler.pool, scheduler._finish
    leaked: set[int] = set()

    def leaking(request: Any, reason: str) -> None:
        is_abort = reason == "abort"
        room = int(fault.most * pool.num_blocks) - len(leaked)
        if window.is_open() and fault.on in ("both", "abort" if is_abort else "finish"):
            held = [block for block in request.blocks if block != HOLE and block not in leaked]
            blocks = held[: min(fault.blocks, room)]
            pool.take(blocks)
            leaked.update(blocks)
        finish(request, reason)

    scheduler._finish = leaking


def slow_kv_disk(engine: Engine, fault: SlowKvDisk) -> None:
    """Raises ModelError where there is no disk tier."""
    window = Window(fault)
    planning = engine.scheduler.technique("tiers")
    stores = [] if planning is None else [tier.store for tier in planning.tiers.slow]
    disks = [store for store in stores if store.name == "disk"]
    if not disks:
        raise ModelError("the fault slow_kv_disk needs a disk tier; set kv_disk_path, or leave it out")

    def cost(*_: Any) -> None:
        if window.is_open():
            spend(fault.ms / 1e3, "sleep")

    for disk in disks:
        disk.medium.read = before(disk.medium.read, cost)


def slow_link(engine: Engine, fault: SlowLink) -> None:
    """The other ranks wait in the same exchange. Raises ModelError without a parallel group."""
    communicators = engine.runner.inner.eager.model.communicators
    if all(communicator.size == 1 for communicator in communicators):
        raise ModelError("the fault slow_link needs a parallel group; set tensor_parallel, or leave it out")
    window = Window(fault)

    def slowed(done: Callable[..., None]) -> Callable[..., None]:
        def wait(name: str, num_bytes: int, exchange: Callable[[], Any]) -> None:
            def late() -> Any:
                if window.is_open():
                    spend(fault.ms / 1e3, "sleep")
                return exchange()

            done(name, num_bytes, late)

        return wait

    for communicator in communicators:
        if communicator.size > 1:
            communicator._done = slowed(communicator._done)


def bad_drafts(engine: Engine, fault: BadDrafts) -> None:
    """A draft is replaced by the id behind it, so that the step verifies as many tokens as before, in vain. Raises
    ModelError without speculation."""
    runner = engine.runner.inner
    proposers = [each.proposer for each in runner.techniques if each.name == "speculation"]
    if not proposers:
        raise ModelError("the fault bad_drafts needs drafts; set speculation, or leave it out")
    window, dice, propose = Window(fault), random.Random(0), proposers[0].propose
    vocab_size = runner.shape.vocab_size

    def spoilt(step: Any) -> Any:
        proposal = propose(step)
        if window.is_open():
            for drafts in proposal.drafts.values():
                drafts[:] = [(id + 1) % vocab_size if dice.random() < fault.share else id for id in drafts]
        return proposal

    proposers[0].propose = spoilt


def core_death(engine: Engine, fault: CoreDeath, end: Callable[[int], None] = os._exit) -> None:
    """Only the first core dies: the one whose steps begin with number 0."""
    if engine.step_number > 0:
        return
    window = Window(fault)

    def cost(*_: Any) -> None:
        if window.elapsed_ns() >= fault.at_s * SECOND_NS:
            end(DEATH_EXIT_CODE)

    engine.scheduler.schedule = after(engine.scheduler.schedule, cost)


PLANTS: dict[type[CoreFault], Callable[[Engine, Any], None]] = {
    SlowHost: slow_host,
    SlowSampler: slow_sampler,
    SlowDevice: slow_device,
    SlowAttention: slow_attention,
    BlockLeak: block_leak,
    SlowKvDisk: slow_kv_disk,
    SlowLink: slow_link,
    CoreDeath: core_death,
    BadDrafts: bad_drafts,
}
