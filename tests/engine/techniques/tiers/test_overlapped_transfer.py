"""Both servers get a call at once: the decode engine reads a prompt while the prefill engine computes it."""

import contextlib
import http.server
import json
import socket
import threading
import time

import pytest
import zmq
from msgspec.structs import replace

from sojourn.engine.kv_source import KVSource
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.techniques.handover import wire
from sojourn.engine.techniques.handover.peer import Peer
from sojourn.metrics.ledger import Account
from tests.engine.harness import drain, hand_over, handoffs_of, make_engine, submit
from tests.engine.memory.audits import audit_tiers
from tests.engine.techniques.handover.test_disaggregation import LENGTHS, PROMPTS, Split, alone, requests

BY_CHUNK = {"max_num_batched_tokens": 16}


@contextlib.contextmanager
def answering_query(answer: bytes, status: int = 200):
    """The port of an HTTP server that answers GET /query."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/query"
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_) -> None:
            """Not into the test's output."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Overlapped(Split):
    """A pair whose proxy sends both calls with one transfer id."""

    def __init__(self, folder, port: int = 0, **settings):
        super().__init__(folder, **settings)
        self.port = port

    @property
    def query(self) -> bytes:
        address = handoffs_of(self.prefill).address
        worker = {"0": {"0": f"tcp://{address.host}:{address.port}"}}
        return json.dumps({"0": {"engine_id": address.model_id, "worker_addr": worker}}).encode()

    def source(self, request: Submit) -> KVSource:
        name = handoffs_of(self.prefill).address.model_id
        return KVSource(name, "127.0.0.1", self.port, transfer_id=f"xfer-{request.request_id}")

    def decode_call(self, request: Submit) -> None:
        hand_over(self.decode, [replace(request, kv_source=self.source(request))])

    def prefill_call(self, request: Submit) -> None:
        one = replace(request.sampling, max_tokens=1)
        call = replace(request, hands_over=True, transfer_id=f"xfer-{request.request_id}", sampling=one)
        hand_over(self.prefill, [call])

    def read_blocks(self, count: int) -> None:
        """Until the decode engine has so many in host memory."""
        deadline = time.monotonic() + 10
        while self.num_read < count:
            assert time.monotonic() < deadline, f"{self.num_read} of {count} blocks were read"
            hand_over(self.decode, [])
            time.sleep(0.002)

    @property
    def num_read(self) -> int:
        return len(self.decode.scheduler.technique("tiers").tiers.host.readable())

    def finish(self) -> None:
        drain(self.decode, check=True)
        for engine in (self.prefill, self.decode):
            audit_tiers(engine.scheduler.technique("tiers").tiers)

    def wait_for_release(self) -> None:
        """Until the prefill engine holds nothing: the decode engine's word comes through the side channel's thread."""
        deadline = time.monotonic() + 10
        while len(handoffs_of(self.prefill).leases) or len(handoffs_of(self.prefill).announcements):
            self.prefill.flush()
            assert time.monotonic() < deadline, "a lease is held"
            time.sleep(0.002)


@pytest.fixture
def overlapped(checkpoints):
    with contextlib.ExitStack() as opened:

        def make(query: bytes | None = None, **settings) -> Overlapped:
            pair = Overlapped(checkpoints["llama"], **{"prefill": BY_CHUNK} | settings)
            opened.callback(pair.close)
            pair.port = opened.enter_context(answering_query(pair.query if query is None else query))
            return pair

        yield make


@pytest.fixture(scope="module")
def expected(checkpoints):
    return alone(checkpoints["llama"])


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("decode_first", [True, False])
def test_blocks_are_read_while_the_prompt_is_computed(overlapped, expected, decode_first, overlap):
    pair = overlapped(prefill=BY_CHUNK | {"overlap": overlap})
    (request, *_) = requests()
    if decode_first:
        pair.decode_call(request)
    pair.prefill_call(request)
    if not decode_first:
        pair.decode_call(request)
    behind = overlap == "on"  # a step is launched before the one before it is read
    for step in range(1, LENGTHS[0] // 16 + 1):
        pair.prefill.receive([], pair.prefill.step())
        pair.read_blocks(step - behind)
        assert not pair.first.ended, "the prompt is not computed yet"
    drain(pair.prefill, check=True)
    pair.finish()
    pair.wait_for_release()
    assert pair.second.tokens["r0"] == expected[0]
    ended = pair.second.ended["r0"]
    assert ended.kv_load.loaded_tokens == {"peer": 80} and ended.computed_tokens == 10 + 7
    assert ended.kv_load.transfer_bytes == 5 * pair.decode.scheduler.technique("tiers").tiers.block_bytes
    assert ended.ledger[Account.REQUEST_REMOTE_PREFILL] > 0 and ended.ledger[Account.MEMORY_TRANSFER] > 0


def test_a_whole_transfer_begins_when_the_prompt_is_computed(overlapped, expected):
    pair = overlapped(prefill=BY_CHUNK | {"kv_transfer_granularity": "whole"})
    for request in requests():
        pair.decode_call(request)
        pair.prefill_call(request)
    for _ in range(5):
        pair.prefill.receive([], pair.prefill.step())
        hand_over(pair.decode, [])
        time.sleep(0.01)
    assert not pair.num_read
    drain(pair.prefill, check=True)
    pair.finish()
    assert [pair.second.tokens[f"r{index}"] for index in range(len(PROMPTS))] == expected
    assert pair.second.ended["r0"].kv_load.loaded_tokens == {"peer": 80}


def test_a_prompt_that_the_decode_server_has_is_followed_and_its_lease_given_back(overlapped, expected):
    pair = overlapped()
    (first, *_), again = requests(), submit("again", PROMPTS[0], 8)
    for request in (first, again):
        pair.decode_call(request)
        pair.prefill_call(request)
        drain(pair.prefill, check=True)
        pair.finish()
        assert pair.second.tokens[request.request_id] == expected[0]
    pair.wait_for_release()
    assert pair.second.ended["again"].kv_load is None, "nothing was read"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("end", ["abort", "silence", "no-call"])
def test_a_prefill_that_ends_in_the_middle_costs_an_error_or_a_local_prefill(
    overlapped, expected, end, strict, monkeypatch
):
    monkeypatch.setattr("sojourn.engine.techniques.handover.peer.SILENCE_S", 0.5)
    monkeypatch.setattr("sojourn.engine.techniques.handover.peer.LOOK_MS", 50)
    monkeypatch.setattr("sojourn.engine.techniques.handover.peer.UNKNOWN_S", 0.3)
    pair = overlapped(decode={"kv_transfer_failure": "error" if strict else "recompute"})
    (request, *_) = requests()
    pair.decode_call(request)
    if end != "no-call":
        pair.prefill_call(request)
        for _ in range(2):
            pair.prefill.receive([], pair.prefill.step())
        pair.read_blocks(2)
    if end == "abort":
        pair.prefill.receive([Abort("r0")], time.monotonic_ns())
        pair.prefill.flush()
    elif end == "silence":
        handoffs_of(pair.prefill).close()  # as where its process has died
    pair.finish()
    ended = pair.second.ended["r0"]
    words = {"abort": "it gave the prompt up: abort", "silence": "it has said nothing", "no-call": "no call with this"}
    if strict:
        assert ended.reason == "error" and ended.is_peer_error and words[end] in ended.error
    else:
        assert pair.second.tokens["r0"] == expected[0]
        loaded = {} if end == "no-call" else {"peer": 32}
        assert (ended.kv_load.loaded_tokens if ended.kv_load else {}) == loaded, "what was read is used"


def test_a_slow_read_is_no_silence_of_the_prefill_server(overlapped, expected, monkeypatch):
    monkeypatch.setattr("sojourn.engine.techniques.handover.peer.SILENCE_S", 0.6)
    monkeypatch.setattr("sojourn.engine.techniques.handover.side_channel.BEAT_S", 0.1)
    read, delays = Peer._read, iter([0.8])
    monkeypatch.setattr(Peer, "_read", lambda peer, *given: time.sleep(next(delays, 0)) or read(peer, *given))
    pair = overlapped()
    (request, *_) = requests()
    pair.decode_call(request)
    pair.prefill_call(request)
    pair.prefill.receive([], pair.prefill.step())
    pair.read_blocks(1)
    drain(pair.prefill, check=True)
    pair.finish()
    assert pair.second.tokens["r0"] == expected[0]
    assert pair.second.ended["r0"].kv_load.loaded_tokens == {"peer": 80}


def test_a_prefill_server_that_is_restarted_serves_the_next_transfer(overlapped, expected, checkpoints):
    """On the same port, so that the decode server's connection reaches its next life."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        place = BY_CHUNK | {"kv_transfer_port": probe.getsockname()[1]}
    pair = overlapped(prefill=place)
    lost, request, *_ = requests()
    pair.prefill_call(lost)
    pair.prefill.receive([], pair.prefill.step())
    pair.decode_call(lost)
    pair.read_blocks(1)
    pair.prefill.close()
    pair.prefill, pair.first = make_engine(checkpoints["llama"], kv_role="prefill", kv_host_gib=1e-3, **place)
    pair.decode_call(request)
    pair.prefill_call(request)
    drain(pair.prefill, check=True)
    pair.finish()
    assert [pair.second.tokens[f"r{index}"] for index in range(2)] == expected[:2]
    assert [pair.second.ended[f"r{index}"].kv_load.loaded_tokens["peer"] for index in range(2)] == [16, 32]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (b"<html>", "gives no address of a side channel"),
        (b'{"0": {"engine_id": "x", "worker_addr": {"0": {"0": "tcp://192.0.2.1:5"}}}}', "kv_peers lists the hosts"),
        (b"[" * 60_000, "gives no address of a side channel"),
    ],
)
def test_an_address_that_answers_query_with_something_else_gets_a_sentence(overlapped, query, words):
    pair = overlapped(query, decode={"kv_transfer_failure": "error"})
    (request, *_) = requests()
    pair.decode_call(request)
    pair.finish()
    assert words in pair.second.ended["r0"].error


def test_an_http_server_that_answers_too_slowly_is_left(overlapped, monkeypatch):
    monkeypatch.setattr("sojourn.engine.techniques.handover.connection.ANSWER_MS", 300)
    pair = overlapped(decode={"kv_transfer_failure": "error"})
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            for _ in range(200):
                connection.sendall(b"H")
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()
    pair.port = listener.getsockname()[1]
    began = time.monotonic()
    pair.decode_call(requests()[0])
    pair.finish()
    assert time.monotonic() - began < 3 and "its /query gave no answer" in pair.second.ended["r0"].error
    listener.close()


def test_garbage_and_lost_messages_on_the_side_channel_end_no_transfer(overlapped, expected):
    """A stranger asks for the same transfer; the decode server misses messages, and asks again."""
    pair = overlapped()
    (request, *_) = requests()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{handoffs_of(pair.prefill).address.port}")
    for message in (b"", b"\xc1", wire.encode(wire.Follow("xfer-r0")), wire.encode(wire.Release("r0-guess"))):
        stranger.send(message)
    pair.prefill_call(request)
    pair.prefill.receive([], pair.prefill.step())
    pair.decode_call(request)
    pair.read_blocks(1)
    (peer,) = pair.decode.scheduler.technique("tiers").tiers._peer.store._peers.values()
    peer._transfers["xfer-r0"].slots.clear()  # the next message does not continue what it knows
    drain(pair.prefill, check=True)
    pair.finish()
    assert pair.second.tokens["r0"] == expected[0]
    assert pair.second.ended["r0"].kv_load.loaded_tokens == {"peer": 80}
    context.destroy(linger=0)
