"""Threads around a medium: what it raises is a failure, and one that hangs is left to its thread."""

import contextlib
import socket
import threading
import time

import pytest

from sojourn.engine.techniques.tiers import medium_store, remote
from sojourn.engine.techniques.tiers.block_format import BlockFormat
from sojourn.engine.techniques.tiers.medium_store import MediumStore
from sojourn.engine.techniques.tiers.remote import Remote
from sojourn.engine.techniques.tiers.store import Moved

KEY = bytes(16)
FORMAT = BlockFormat(b"f" * 16, 1000)
MEMORY = memoryview(bytearray(1000))


class ScriptedMedium:
    """Reads wait for `goes_on`; writes and removals raise."""

    name, block_bytes = "disk", 10

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()
        self.complaints: list[str] = []
        self.is_closed = False

    def known(self) -> list[bytes]:
        return [KEY]

    def read(self, key: bytes, slot: int) -> bool:
        self.has_begun.set()
        return self.goes_on.wait(20)

    def write(self, key: bytes, slot: int) -> None:
        raise ValueError("no room")

    def remove(self, key: bytes) -> None:
        raise ValueError("no such file")

    def failed(self, operation: str, error: Exception) -> None:
        self.complaints.append(f"{operation}: {error}")

    def close(self) -> None:
        self.is_closed = True


def ended(store: MediumStore, count: int) -> list[Moved]:
    found, until_s = [], time.monotonic() + 20
    while len(found) < count and time.monotonic() < until_s:
        store.wait()
        found += store.finished()
    return found


def test_what_a_medium_raises_is_a_failure_and_its_thread_goes_on():
    medium = ScriptedMedium()
    store = MediumStore(medium)
    store.remove(KEY)
    store.write(KEY, 0)
    store.write(KEY, 1)
    assert [(moved.is_read, moved.ok) for moved in ended(store, 2)] == [(False, False)] * 2
    assert medium.complaints == ["remove: no such file", "write: no room", "write: no room"]
    store.close()
    assert medium.is_closed


def test_a_medium_is_not_closed_while_a_thread_uses_it(monkeypatch):
    """Closing gives the folder of a disk to another process, and the thread could still write there."""
    monkeypatch.setattr(medium_store, "CLOSE_S", 0.05)
    medium = ScriptedMedium()
    store = MediumStore(medium)
    store.read(KEY, 0)
    assert medium.has_begun.wait(20)
    store.close()
    assert not medium.is_closed
    medium.goes_on.set()
    assert ended(store, 1)[0].ok


def send_slowly(listener: socket.socket) -> None:
    """A byte of an answer ten times a second, until the client has gone."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        while True:
            connection.sendall(b"\0")
            time.sleep(0.1)


@pytest.mark.parametrize("answers_of", ["read", "count_known"])
def test_a_server_that_sends_a_byte_now_and_then_has_no_more_time_than_another(answers_of, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=send_slowly, args=(listener,), daemon=True).start()
        tier = Remote(f"lm://127.0.0.1:{listener.getsockname()[1]}", FORMAT, lambda slot: MEMORY)
        began_s = time.monotonic()
        if answers_of == "read":
            with pytest.raises(TimeoutError):
                tier.read(KEY, 0)
        else:
            assert tier.count_known([KEY]) == 0
        assert time.monotonic() - began_s < 2
        tier.close()


def test_a_server_that_failed_is_tried_again_however_often_it_is_asked_in_between(monkeypatch):
    monkeypatch.setattr(remote, "RETRY_S", 0.2)
    tier = Remote("lm://127.0.0.1:1", FORMAT, lambda slot: MEMORY)
    with pytest.raises(ConnectionRefusedError):
        tier.read(KEY, 0)
    until_s, refusals = time.monotonic() + 5, []
    while time.monotonic() < until_s and not (refusals and refusals[-1] == "ConnectionRefusedError"):
        with pytest.raises(ConnectionError) as refused:
            tier.read(KEY, 0)
        refusals.append(type(refused.value).__name__)
        time.sleep(0.02)
    assert refusals[0] == "ConnectionError" and refusals[-1] == "ConnectionRefusedError"
