"""A core process without torch or a model: `python -m tests.engine.server.core.fake_core FRONT_PID`.

It reads its assignment as the real one does. The environment says what it does then:
FAKE_CORE=beats (each 0.1 s; one token for each request a beat), silent (ready, and never a word again), garbage (noise
between its beats), dies (a moment after it is ready), damaged (says that the model is), loads (for ever), serves (each
request gets its tokens and its end; a model named slow-… takes LOAD_SECONDS to load, one named damaged-… is so).
"""

import json
import os
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from sojourn.engine import FIRST_LINE_NS, messages
from sojourn.engine.core import Mailbox
from sojourn.engine.process import end_with_parent, name_process
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.ledger import CLOCKED, Account, new_ledger
from sojourn.metrics.memory.plan import MemoryPlan

SHAPE = ModelShape(10, 2, 2, 2, 1, ((None, 1),), 1, 1)
MEMORY = MemoryPlan(**dict.fromkeys(MemoryPlan.__struct_fields__, 0))
READY = messages.Ready("fake", "cpu", "float32", 1, 100, 10, 16, "float32", 1, 1, SHAPE, MEMORY)
LOAD_SECONDS = 0.4
NOISE = (b"", b"\xff", b"\x81\xa4type\xa5Ghost", b"\x81\xa4type\xa4Beat", b"\x91" * 2000)


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    name_process("sojourn-spare")
    if not (line := sys.stdin.readline()):
        return
    name_process("sojourn-core")
    work = json.loads(line)
    behaviour, mailbox = os.environ["FAKE_CORE"], Mailbox(Path(work["sockets"]))
    if behaviour == "serves":
        return serve(mailbox, work)
    if behaviour == "damaged":
        mailbox.publish(messages.Failed("the model is damaged"))
        mailbox.close()
        sys.exit(1)
    if behaviour == "loads":
        time.sleep(600)
    mailbox.publish(READY)
    if behaviour == "silent":
        time.sleep(600)
    if behaviour == "dies":
        mailbox.close()
        sys.exit(1)
    turn(mailbox, NOISE if behaviour == "garbage" else ())


def serve(mailbox: Mailbox, work: dict) -> None:
    """As the real one: calls end, and the core sleeps and wakes."""
    name = work["config"]["served_model_name"] or ""
    clock = StartupClock.of_process(work["wanted_ns"], work["spawned_ns"], FIRST_LINE_NS, time.monotonic_ns())
    if name.startswith("damaged"):
        mailbox.publish(messages.Failed("the model is damaged"))
        return mailbox.close()
    if name.startswith("slow"):
        time.sleep(LOAD_SECONDS)
    kv_bytes = int((work["config"]["kv_cache_gib"] or 0) * (1 << 30))
    memory = replace(MEMORY, weight_bytes=1 << 30, kv_bytes=kv_bytes)
    mailbox.publish(replace(READY, startup=clock.startup(), max_model_len=100, num_kv_blocks=100, memory=memory))
    left: dict[str, int] = {}
    begun: dict[str, int] = {}
    for step in range(100_000):
        mailbox.wait(10)
        for message in mailbox.read():
            if isinstance(message, messages.Stop):
                return mailbox.close()
            if isinstance(message, messages.Sleep):
                assert not left
                mailbox.publish(messages.Slept(kv_bytes, 0))
            elif isinstance(message, messages.Wake):
                mailbox.publish(messages.Woken())
            elif isinstance(message, messages.Submit):
                left[message.request_id] = message.sampling.max_tokens
                begun[message.request_id] = message.encoded_ns
            elif isinstance(message, messages.Abort):
                left.pop(message.request_id, None)
        now_ns, outputs = time.monotonic_ns(), []
        for request_id in left:
            left[request_id] -= 1
            reason = None if left[request_id] else "length"
            outputs.append(
                messages.Output(request_id, 70, messages.LedgerBase(decoded(now_ns - begun[request_id]), {}), reason)
            )
        admitted = [(request_id, 0) for request_id in left]
        if left:
            counts = (100, 0, 0)
            mailbox.publish(messages.Tokens(now_ns, (0,) * len(CLOCKED), admitted, outputs, step, counts, 0, len(left)))
            over = [request_id for request_id, number in left.items() if not number]
            ended = [messages.Ended(each, "length", now_ns, decoded(now_ns - begun[each]), {}, 0, 1) for each in over]
            left = {request_id: number for request_id, number in left.items() if number}
            mailbox.publish(messages.Observed(None, ended))
        mailbox.beat(now_ns)


def decoded(ns: int) -> list[int]:
    """A ledger of so much decoding, and nothing else."""
    ledger = new_ledger()
    ledger[Account.COMPUTE_DECODE] = ns
    return ledger


def turn(mailbox: Mailbox, noise: tuple[bytes, ...]) -> None:
    known: list[str] = []
    for step in range(6000):
        for raw in noise:
            mailbox._outbox.send(raw)
        for message in mailbox.read():
            if isinstance(message, messages.Stop):
                return
            if isinstance(message, messages.Submit):
                known.append(message.request_id)
        outputs = [messages.Output(name, 5, messages.LedgerBase(new_ledger(), {})) for name in known]
        admitted = [(name, 0) for name in known]
        now_ns = time.monotonic_ns()
        mailbox.publish(
            messages.Tokens(now_ns, (0,) * len(CLOCKED), admitted, outputs, step, (10, 0, 0), 0, len(known))
        )
        mailbox.publish(messages.Observed(None, []))
        mailbox.beat(now_ns)
        mailbox.wait(100)


if __name__ == "__main__":
    main()
