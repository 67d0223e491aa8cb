"""A core process without torch or a model: `python -m tests.engine.server.core.fake_core FRONT_PID`.

It reads its assignment as the real one does. The environment says what it does then:
FAKE_CORE=beats (each 0.1 s; one token for each request a beat), silent (ready, and never a word again), garbage (noise
between its beats), dies (a moment after it is ready), damaged (says that the model is), loads (for ever).
"""

import json
import os
import sys
import time
from pathlib import Path

from engine import messages
from engine.core import Mailbox
from engine.process import end_with_parent, name_process
from metrics.compute.cost_model import ModelShape
from metrics.ledger import CLOCKED, new_ledger
from metrics.memory.plan import MemoryPlan

SHAPE = ModelShape(10, 2, 2, 2, 1, ((None, 1),), 1, 1)
MEMORY = MemoryPlan(**dict.fromkeys(MemoryPlan.__struct_fields__, 0))
READY = messages.Ready("fake", "cpu", "float32", 1, 100, 10, 16, "float32", 1, 1, SHAPE, MEMORY)
NOISE = (b"", b"\xff", b"\x81\xa4type\xa5Ghost", b"\x81\xa4type\xa4Beat", b"\x91" * 2000)


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    name_process("sojourn-spare")
    if not (line := sys.stdin.readline()):
        return
    name_process("sojourn-core")
    behaviour, mailbox = os.environ["FAKE_CORE"], Mailbox(Path(json.loads(line)["sockets"]))
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
            messages.Tokens(now_ns, (0,) * len(CLOCKED), admitted, outputs, step, (10, 0, 0, 0), 0, len(known))
        )
        mailbox.publish(messages.Observed(None, []))
        mailbox.beat(now_ns)
        mailbox.wait(100)


if __name__ == "__main__":
    main()
