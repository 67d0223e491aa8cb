"""The sockets of KV events: numbers, replays, strangers."""

import asyncio
import contextlib

import msgspec
import pytest
import zmq
import zmq.asyncio

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.fleet.kv_event_publisher import KVEventPublisher, warn_of_exposure
from sojourn.metrics.errors import ServerError


def config(tmp_path, **more) -> EngineConfig:
    settings = {"kv_events": f"ipc://{tmp_path}/events", "kv_events_replay": f"ipc://{tmp_path}/replay"}
    return EngineConfig(model="tiny-model", **(settings | more))


@contextlib.asynccontextmanager
async def publishing(tmp_path, **more):
    publisher = KVEventPublisher(config(tmp_path, **more))
    answering = asyncio.create_task(publisher.answer_replays())
    context = zmq.asyncio.Context()
    try:
        yield publisher, context
        assert not answering.done(), "a stranger ended the answers"
    finally:
        answering.cancel()
        context.destroy(linger=0)
        publisher.close()


async def replay(publisher: KVEventPublisher, context: zmq.asyncio.Context, first: int) -> list[list[bytes]]:
    """All answers up to the end marker."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(publisher.replay_endpoint)
    await dealer.send_multipart([b"", first.to_bytes(8, "big")])
    answers = []
    while True:
        answers.append(await asyncio.wait_for(dealer.recv_multipart(), 5))
        if answers[-1][-2] == b"\xff" * 8:
            return answers


def test_a_subscriber_gets_topic_number_and_batch(tmp_path):
    async def scenario():
        async with publishing(tmp_path, kv_events_topic="kv@pod@model") as (publisher, context):
            subscriber = context.socket(zmq.SUB)
            subscriber.connect(publisher.endpoint)
            subscriber.subscribe("kv@")
            await asyncio.sleep(0.1)  # until the subscription arrived
            for batch in (b"one", b"two"):
                publisher.publish(batch)
            return [await asyncio.wait_for(subscriber.recv_multipart(), 5) for _ in range(2)]

    assert asyncio.run(scenario()) == [
        [b"kv@pod@model", bytes(8), b"one"],
        [b"kv@pod@model", bytes(7) + b"\x01", b"two"],
    ]


@pytest.mark.parametrize(("wire_format", "frames"), [("map", 4), ("array", 3)])
def test_a_replay_gives_what_the_buffer_has_from_a_number_on(tmp_path, wire_format, frames):
    async def scenario():
        async with publishing(tmp_path, kv_events_buffer=3, kv_events_format=wire_format) as (publisher, context):
            for number in range(5):
                publisher.publish(b"%d" % number)
            return [await replay(publisher, context, first) for first in (0, 3, 5, 2**63)]

    everything, some, *nothing = asyncio.run(scenario())
    assert [answer[-1] for answer in everything] == [b"2", b"3", b"4", b""], "the two oldest are no longer there"
    assert [int.from_bytes(answer[-2], "big") for answer in some[:-1]] == [3, 4]
    assert all(len(answer) == 1 for answer in nothing)
    assert {len(answer) for answer in everything} == {frames} and {answer[0] for answer in everything} == {b""}


def test_numbers_go_on_when_the_core_dies_and_say_that_all_is_gone(tmp_path):
    async def scenario():
        async with publishing(tmp_path) as (publisher, context):
            publisher.clear()
            publisher.publish(b"one")
            publisher.clear()
            return await replay(publisher, context, 0)

    first, cleared, _ = asyncio.run(scenario())
    assert first[-1] == b"one", "nothing was cached before the first batch"
    assert msgspec.msgpack.decode(cleared[-1])[1] == [{"type": "AllBlocksCleared"}]


def test_strangers_cost_nothing(tmp_path):
    async def scenario():
        async with publishing(tmp_path) as (publisher, context):
            publisher.publish(b"one")
            stranger = context.socket(zmq.DEALER)
            stranger.connect(publisher.replay_endpoint)
            for frames in ([b""], [b"", b"", b""], [b"", b"7 bytes"], [b"x", bytes(8)], [b"\x80\x04pickle"]):
                await stranger.send_multipart(frames)
            large = context.socket(zmq.DEALER)
            large.connect(publisher.replay_endpoint)
            await large.send_multipart([b"", bytes(1_000_000)])
            return await replay(publisher, context, 0)

    assert len(asyncio.run(scenario())) == 2


def test_an_address_that_is_taken_or_holds_a_file_is_refused(tmp_path):
    first = KVEventPublisher(config(tmp_path, kv_events="tcp://127.0.0.1:0", kv_events_replay=None))
    assert not first.endpoint.endswith(":0") and warn_of_exposure(first) is None
    with pytest.raises(ServerError, match=r"cannot listen on .*--kv-events"):
        KVEventPublisher(config(tmp_path, kv_events=first.endpoint, kv_events_replay=None))
    first.close()
    (tmp_path / "events").write_text("a letter")
    with pytest.raises(ServerError, match="is no socket"):
        KVEventPublisher(config(tmp_path))
    assert (tmp_path / "events").read_text() == "a letter"


def test_an_address_that_others_reach_is_warned_of(tmp_path):
    publisher = KVEventPublisher(config(tmp_path, kv_events="tcp://*:0", kv_events_replay=None))
    assert "without a key" in warn_of_exposure(publisher)
    publisher.close()
