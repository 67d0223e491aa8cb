"""Drawn traffic on drawn engines over the simulated device: every message that leaves the loop, to the nanosecond."""

import random
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from sojourn.engine import messages
from sojourn.engine.kv_event_wire import WireFormat
from sojourn.engine.memory.eviction import EVICTION_POLICIES
from sojourn.engine.memory.window import FreedWindow
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.records.tables import row
from tests.engine.simulated import Simulation

COUNT = 200
LONGEST = 60  # tokens of a prompt


def streams() -> Iterator[tuple[str, Any]]:
    for seed in range(COUNT):
        yield f"{seed:03d}", stream(seed)


def stream(seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    settings = drawn_settings(dice)
    simulation, told = Simulation(**settings), []
    pool = simulation.scheduler.pool
    pool._index.policy._clock = lambda: simulation.clock.now_ns  # in place of the machine's: ages of blocks, ...
    if pool.events is not None:
        pool.events._clock = lambda: simulation.clock.now_ns / 1e9  # ... and moments of KV events
    take = simulation.engine.publish

    def publish(message: messages.Tokens | messages.Observed | messages.KVEvents) -> None:
        told.append(_plain(message))
        take(message)

    simulation.engine.publish = publish
    _serve(simulation, dice, hands_over="lease_ns" in settings)
    return {"settings": {name: repr(value) for name, value in settings.items()}, "messages": told}


def _serve(simulation: Simulation, dice: random.Random, hands_over: bool) -> None:
    stems = [[dice.randrange(3, 50) for _ in range(LONGEST)] for _ in range(3)]
    for number in range(dice.randint(4, 24)):
        simulation.receive(*_arrival(dice, number, stems, hands_over))
        if dice.random() < 0.1:
            simulation.receive(messages.Abort(f"r{dice.randrange(number + 1)}"))
        for _ in range(dice.choice((0, 1, 2, 5, 20))):
            if simulation.engine.has_work:
                simulation.step()
        simulation.clock.now_ns += dice.choice((0, 0, 3_000_000))
    simulation.drain()


def drawn_settings(dice: random.Random) -> dict[str, Any]:
    """Settings that a Simulation accepts together."""
    size = dice.choice((1, 4, 5))
    blocks = -(-2 * LONGEST // size)
    knobs: dict[str, Any] = {"eviction_policy": dice.choice(list(EVICTION_POLICIES))}
    if knobs["eviction_policy"] == "ttl":
        knobs["eviction_ttl_seconds"] = dice.choice((60.0, 0.01))
    if dice.random() < 0.5:
        knobs |= {"speculation": "ngram", "speculation_tokens": dice.choice((1, 4, 7))}
        knobs["speculation_adaptive"] = dice.choice(("on", "off"))
    settings: dict[str, Any] = {
        "num_blocks": blocks + dice.choice((1, 4, 200)), "block_size": size, "overlap": dice.random() < 0.5,
        "policy": dice.choice(list(POLICIES)), "prefix_caching": dice.random() < 0.8,
        "max_num_seqs": dice.choice((1, 3, 8)), "max_num_batched_tokens": dice.choice((8, 32, 200)), "knobs": knobs,
    }  # fmt: skip
    if dice.random() < 0.3:
        settings["max_prefill_chunk_tokens"] = dice.choice((3, 7))
    if dice.random() < 0.2:
        settings["kv_events"] = dice.choice(get_args(WireFormat))
    if dice.random() < 0.2:
        settings["window"] = FreedWindow(dice.choice((9, 20)), dice.choice((0, 4)), settings["max_num_batched_tokens"])
    elif settings["prefix_caching"] and dice.random() < 0.5:
        settings |= {"host_blocks": dice.choice((2, 40)), "stores": dice.choice(("fill", "evict", "reuse"))}
        if dice.random() < 0.3:
            settings |= {"lease_ns": dice.choice((2_000_000, 10**12)), "by_chunk": dice.random() < 0.5}
        elif dice.random() < 0.5:
            settings["disk_blocks"] = dice.choice((4, 100))
    return settings


def _arrival(dice: random.Random, number: int, stems: list[list[int]], hands_over: bool) -> list[messages.Submit]:
    """A request, with the forks that share its prompt."""
    prompt = dice.choice(stems)[: dice.randint(1, LONGEST - 4)] + [50 + number % 4] * dice.randint(0, 4)
    sampling = SamplingParams(max_tokens=dice.randint(1, 30), temperature=0.0, ignore_eos=True)
    first = messages.Submit(
        f"r{number}", prompt, sampling, encoded_ns=0, tenant=dice.choice(("", "a", "b")), priority=dice.randint(0, 2),
        weight=dice.choice((1, 3)), hands_over=hands_over and dice.random() < 0.5,
    )  # fmt: skip
    forks = 0 if first.hands_over else dice.choice((0, 0, 0, 2))
    return [
        first,
        *(msgspec.structs.replace(first, request_id=f"r{number}.{fork}", fork_of=first.request_id)
          for fork in range(forks)),
    ]  # fmt: skip


def _plain(message: messages.Tokens | messages.Observed | messages.KVEvents) -> Any:
    if isinstance(message, messages.Observed) and message.step is not None:
        # The columns of the table: how the record is made of parts is not what it says.
        whole = msgspec.to_builtins(msgspec.structs.replace(message, step=None))
        return whole | {"step": row(message.step)}
    return msgspec.to_builtins(message)
