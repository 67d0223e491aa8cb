"""Dynamo's SelectionService reads our KV events: a second consumer, with its own decoder, of both forms and of replays.

SOJOURN_DYNAMO_PYTHON names the python of an environment with ai-dynamo and ai-dynamo-runtime 1.6.1.
"""

import asyncio
import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.memory.kv_events import KVEventLog
from sojourn.engine.server.fleet.kv_event_publisher import KVEventPublisher

PYTHON = os.environ.get("SOJOURN_DYNAMO_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_DYNAMO_PYTHON names no python with ai-dynamo"),
]
SIZE = 4
CONSUMER = """
import asyncio, inspect, json, sys
from dynamo.llm import SelectionService

async def value(found):
    return await found if inspect.isawaitable(found) else found

async def main():
    service, events, replay = SelectionService(), *sys.argv[1:]
    await value(service.upsert_worker({
        "worker_id": 1, "model_name": "m", "endpoint": "http://127.0.0.1:1", "block_size": 4,
        "max_num_batched_tokens": 512, "data_parallel_start_rank": 0, "data_parallel_size": 1,
        "kv_events_endpoints": {0: events}, "replay_endpoint": replay,
    }))
    print("OVERLAP ready", flush=True)
    for line in sys.stdin:
        found = await value(service.overlap_scores({"model_name": "m", "token_ids": json.loads(line)}))
        print("OVERLAP", json.dumps(found["workers"]), flush=True)

asyncio.run(main())
"""


class Consumer:
    """The service in a process of its own."""

    def __init__(self, publisher: KVEventPublisher):
        command = [PYTHON, "-c", CONSUMER, publisher.endpoint, publisher.replay_endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def answer(self) -> str:
        for line in self.process.stdout:
            if line.startswith("OVERLAP"):
                return line.removeprefix("OVERLAP")
        raise AssertionError("the service ended")

    def device_blocks(self, token_ids: list[int]) -> int:
        self.process.stdin.write(json.dumps(token_ids) + "\n")
        self.process.stdin.flush()
        workers = json.loads(self.answer())
        return workers[0]["device_blocks"] if workers else 0

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(10)


async def becomes(consumer: Consumer, token_ids: list[int], blocks: int) -> None:
    for _ in range(50):
        found = await asyncio.to_thread(consumer.device_blocks, token_ids)
        if found == blocks:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"it knows {found} blocks, and the server holds {blocks}")


@pytest.mark.parametrize("wire_format", ["map", "array"])
def test_the_service_knows_the_blocks_that_the_server_holds(wire_format):
    settings = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    publisher = KVEventPublisher(EngineConfig(model="m", kv_events_format=wire_format, **settings))
    log = KVEventLog(SIZE, wire_format)
    writer = SimpleNamespace(token_ids=list(range(100, 140)), cache_salt="", adapter=None)
    keys = [bytes([number]) * 16 for number in range(1, 11)]

    def store(first: int, end: int) -> None:
        for index in range(first, end):
            log.stored(writer, index, keys[index], keys[index - 1] if index else None)
        publisher.publish(log.take())

    async def scenario() -> None:
        answering = asyncio.create_task(publisher.answer_replays())
        if wire_format == "map":
            store(0, 4)  # nobody listens yet: the service has to ask for it
            consumer = await asyncio.to_thread(Consumer, publisher)
        else:
            consumer = await asyncio.to_thread(Consumer, publisher)
            await asyncio.sleep(1)  # until its subscription arrived
            store(0, 4)
        try:
            await asyncio.sleep(1)
            store(4, 10)
            await becomes(consumer, writer.token_ids, 10)
            for key in keys[:5:-1]:
                log.removed(key)
            publisher.publish(log.take())
            await becomes(consumer, writer.token_ids, 6)
            publisher.clear()
            await becomes(consumer, writer.token_ids, 0)
        finally:
            await asyncio.to_thread(consumer.close)
            answering.cancel()

    asyncio.run(scenario())
    publisher.close()
