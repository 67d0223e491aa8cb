"""The remote tier: a server of LMCache keeps blocks for several engines, also of other machines.

The protocol is that of LMCache 0.5's cache server (`lmcache_server HOST PORT`, module lmcache.v1.server): a request is
nine 32-bit integers and a key of 150 characters, an answer is nine integers, and the bytes follow. A block is stored as
LMCache's binary format, with our header before it. A PUT has no answer: whether it arrived shows when it is read.

The server is trusted as the disk is: it sees keys and values of prompts, without encryption. It never evicts.
"""

import re
import socket
import struct
import time
from collections.abc import Callable, Sequence

from sojourn.engine.techniques.tiers.block_format import HEADER, BlockFormat
from sojourn.engine.techniques.tiers.worker import Complaints
from sojourn.metrics.errors import ModelError

REQUEST = struct.Struct("<9i150s")  # command, length, format, dtype, location, shape (4), key
ANSWER = struct.Struct("<9i")  # code, length, format, dtype, shape (4), location
PUT, GET, EXIST = 1, 2, 3
SUCCESS = 200
BINARY, UINT8 = 4, 6  # LMCache's numbers of its binary format, and of the dtype
TIMEOUT_S = 2.0  # of one block, and of all questions for one prefix
RETRY_S = 10.0  # after a failure the server is left alone
OUTCOMES = {"read": "read from", "write": "written to", "ask": "asked"}
QUICKACK = getattr(socket, "TCP_QUICKACK", None)
URL = re.compile(r"lm://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})")


class Remote:
    """Blocks of one model on a server, by a connection that reads and one that writes."""

    name = "remote"

    def __init__(self, url: str, form: BlockFormat, slot_bytes: Callable[[int], memoryview]):
        self.url = url
        self.block_bytes = form.block_bytes
        self._format = form
        self._slot_bytes = slot_bytes
        address = server_address(url)
        self._complaints = Complaints()
        self._reading, self._writing = _Connection(address), _Connection(address)

    def known(self) -> list[bytes]:
        """None: the server is asked for each prefix."""
        return []

    def count_known(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, the server has. Of a slow one: says it has, within TIMEOUT_S."""
        count, until_s = 0, time.monotonic() + TIMEOUT_S
        try:
            for key in keys:
                if time.monotonic() > until_s or self._reading.ask(EXIST, self._key(key))[0] != SUCCESS:
                    break
                count += 1
        except Exception as error:
            self.failed("ask", error)
        return count

    def read(self, key: bytes, slot: int) -> bool:
        code, length = self._reading.ask(GET, self._key(key))
        if code != SUCCESS:
            return False
        header, memory = bytearray(HEADER.size), self._slot_bytes(slot)
        if length != self.block_bytes:
            self._reading.close()  # what follows is not for us
        else:
            self._reading.receive(memoryview(header))
            self._reading.receive(memory)
            if self._format.is_whole(key, bytes(header), memory):
                return True
        self._complaints.log("damaged", "a KV block of %s is damaged; its tokens are computed instead", self.url)
        return False

    def write(self, key: bytes, slot: int) -> None:
        memory = self._slot_bytes(slot)
        self._writing.begin()
        self._writing.send(self._request(PUT, key), self._format.header(key, memory), memory)

    def remove(self, key: bytes) -> None:
        """The protocol removes nothing."""

    def failed(self, operation: str, error: Exception) -> None:
        self._complaints.log(
            operation, "the KV tier %s could not be %s: %s; tokens are computed instead", self.url,
            OUTCOMES[operation], error,
        )  # fmt: skip

    def close(self) -> None:
        self._reading.close()
        self._writing.close()

    def _request(self, command: int, key: bytes) -> bytes:
        return _request(command, self._key(key), self.block_bytes)

    def _key(self, key: bytes) -> bytes:
        """As LMCache writes keys: model, world size, worker, hash, dtype."""
        return f"sojourn-{self._format.fingerprint.hex()}@1@0@{key.hex()}@uint8".encode()


class _Connection:
    """One connection, which is made when it is needed, and again some time after it failed.

    An operation has TIMEOUT_S in all, also with a server that sends a byte now and then.
    """

    def __init__(self, address: tuple[str, int]):
        self._address = address
        self._socket: socket.socket | None = None
        self._failed_s = -RETRY_S
        self._until_s = 0.0  # the operation under way has failed then

    def begin(self) -> None:
        """Another operation: its parts follow."""
        now_s = time.monotonic()
        if self._socket is None and now_s - self._failed_s < RETRY_S:
            raise ConnectionError("it failed a moment ago")
        self._until_s = now_s + TIMEOUT_S

    def ask(self, command: int, key: bytes) -> tuple[int, int]:
        """Begins an operation. Returns the code and the length of the answer."""
        self.begin()
        self.send(_request(command, key, 0))
        answer = bytearray(ANSWER.size)
        self.receive(memoryview(answer))
        code, length, *_ = ANSWER.unpack(answer)
        return code, length

    def send(self, *parts: bytes | memoryview) -> None:
        try:
            for part in parts:
                self._open().sendall(part)
        except OSError:
            self._fail()
            raise

    def receive(self, into: memoryview) -> None:
        try:
            while into:
                connection = self._open()
                if QUICKACK is not None:  # else the server's second write waits for a delayed acknowledgement
                    connection.setsockopt(socket.IPPROTO_TCP, QUICKACK, 1)
                count = connection.recv_into(into)
                if not count:
                    raise ConnectionResetError("the server closed the connection")
                into = into[count:]
        except OSError:
            self._fail()
            raise

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open(self) -> socket.socket:
        """The connection, which gives up when the operation's time is over."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it took longer than {TIMEOUT_S:g} s")
        if self._socket is None:
            self._socket = socket.create_connection(self._address, left_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(left_s)
        return self._socket

    def _fail(self) -> None:
        self.close()
        self._failed_s = time.monotonic()


def _request(command: int, key: bytes, length: int) -> bytes:
    return REQUEST.pack(command, length, BINARY, UINT8, 0, length, 0, 0, 0, key.ljust(150))


def server_address(url: str) -> tuple[str, int]:
    found = URL.fullmatch(url)
    if found is None or int(found["port"]) > 65535:
        raise ModelError(f"kv_remote_url={url} is no address; give it as lm://host:port")
    return found["host"].strip("[]"), int(found["port"])


def check_reachable(url: str) -> None:
    """Raises ModelError where no server listens at that address."""
    try:
        socket.create_connection(server_address(url), TIMEOUT_S).close()
    except OSError as error:
        raise ModelError(f"kv_remote_url: no server answers at {url}: {error.strerror or error}; start it") from None
