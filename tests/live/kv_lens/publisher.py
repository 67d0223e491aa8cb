"""A publisher of KV events on real sockets, after vLLM's: PUB, and a ROUTER that answers for missed messages."""

import threading

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def batch(*events: dict | list, seconds: float = 1.7e9) -> bytes:
    return msgspec.msgpack.encode([seconds, list(events), 0])


def stored(blocks: list[int], parent: int | None = None, **more) -> dict:
    return {
        "type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent, "token_ids": [424242] * 16,
        "block_size": 16, "lora_id": None, "medium": "GPU", **more,
    }  # fmt: skip


def removed(blocks: list[int], medium: str = "GPU") -> dict:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": medium}


class Publisher:
    """Owns the sockets. `publish` sends; with `lose` it only remembers."""

    def __init__(self, topic: bytes = b"", *, answers: bool = True, topic_in_answers: bool = True):
        self.sent: list[bytes] = []
        self.questions: list[int] = []
        self._topic, self._topic_in_answers = topic, topic_in_answers
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.events = self._bound(self._pub)
        self.replay = self._bound(self._router)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        if answers:
            self._thread.start()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)

    def publish(self, payload: bytes, *, lose: bool = False) -> None:
        self.sent.append(payload)
        if not lose:
            self.raw(self._topic, (len(self.sent) - 1).to_bytes(8, "big"), payload)

    def raw(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def begin_anew(self) -> None:
        self.sent = []

    def _bound(self, made: zmq.Socket) -> str:
        made.bind("tcp://127.0.0.1:*")
        return made.getsockopt_string(zmq.LAST_ENDPOINT)

    def _answer(self) -> None:
        while not self._stopping.is_set():
            if not self._router.poll(20):
                continue
            peer, _, first = self._router.recv_multipart()
            self.questions.append(int.from_bytes(first, "big"))
            topic = (self._topic,) if self._topic_in_answers else ()
            for number in range(self.questions[-1], len(self.sent)):
                self._router.send_multipart((peer, b"", *topic, number.to_bytes(8, "big"), self.sent[number]))
            self._router.send_multipart((peer, b"", *([b""] if topic else []), END, b""))
