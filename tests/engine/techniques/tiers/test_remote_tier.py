"""The remote KV tier over a server that speaks LMCache's protocol: tests/peers has the real one."""

import socket
import struct
import threading
import time

import pytest

from sojourn.engine.config import EngineConfig
from tests.engine.harness import drain, hand_over, make_engine, submit

PROMPT = [*range(3, 300, 2)]
HEAD = struct.Struct("<9i150s")


class CacheServer:
    """Commands 1, 2, 3 as LMCache's server has them, for any number of connections. `contents` is by key."""

    def __init__(self):
        self.contents: dict[bytes, bytes] = {}
        self.is_frozen = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"lm://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection.makefile("rwb"),), daemon=True).start()

    def _serve(self, stream) -> None:
        try:
            while len(head := stream.read(HEAD.size)) == HEAD.size:
                command, length, form, dtype, *_, key = HEAD.unpack(head)
                key, found = key.strip(), self.contents.get(key.strip())
                if command == 1:
                    assert (form, dtype) == (4, 6) and len(key.split(b"@")) == 5
                    contents = stream.read(length)
                    if not self.is_frozen:
                        self.contents[key] = contents
                    continue
                stream.write(struct.pack("<9i", 400 if found is None else 200, len(found or b"") if command == 2 else 0,
                                         4, 6, 0, 0, 0, 0, 0))  # fmt: skip
                if command == 2 and found is not None:
                    stream.write(found)
                stream.flush()
        except (OSError, ValueError):
            return


@pytest.fixture
def server():
    server = CacheServer()
    yield server
    server.close()


def ask(folder, url: str, prompt: list[int] = PROMPT):
    engine, published = make_engine(folder, kv_remote_url=url, kv_host_gib=1e-3)
    hand_over(engine, [submit("r", prompt, 8)])
    drain(engine)
    engine.close()
    return published.tokens["r"], published.ended["r"], published.records


def check_two_engines_share(folder, url: str) -> None:
    """The second engine has the prefix from the server, and says the same."""
    first, ended, _ = ask(folder, url)
    assert not (ended.kv_load and ended.kv_load.loaded_tokens)
    time.sleep(0.2)  # a write has no answer
    tokens, ended, _ = ask(folder, url)
    assert tokens == first
    assert ended.kv_load.loaded_tokens == {"remote": 144} == {"remote": ended.prefix.prefix_outcomes["hit_remote"]}
    longer, ended, _ = ask(folder, url, [*PROMPT, *first[:4]])
    assert ended.kv_load.loaded_tokens == {"remote": 144} and longer[:4] == first[4:]


def test_two_engines_share_blocks_through_a_server(checkpoints, server):
    check_two_engines_share(checkpoints["llama"], server.url)


def test_another_model_finds_nothing(checkpoints, server):
    ask(checkpoints["llama"], server.url)
    _, ended, _ = ask(checkpoints["qwen2"], server.url)
    assert not (ended.kv_load and ended.kv_load.loaded_tokens)


def test_damaged_and_short_answers_are_computed_instead(checkpoints, server):
    expected, _, _ = ask(checkpoints["llama"], server.url)
    while len(server.contents) < 9:  # the writes that are on their way
        time.sleep(0.01)
    server.is_frozen = True
    for damage in (lambda value: value[:90] + b"?" + value[91:], lambda value: value[:-5], lambda value: value + b"x"):
        contents = dict(server.contents)
        server.contents = {key: damage(value) for key, value in contents.items()}
        tokens, ended, records = ask(checkpoints["llama"], server.url)
        assert tokens == expected and not ended.kv_load.loaded_tokens
        assert sum(record.tier_failures.get("remote", 0) for record in records) > 0
        server.contents = contents


def test_a_server_that_is_away_holds_nobody_up(checkpoints, caplog):
    expected = ask(checkpoints["llama"], _closed_port())[0]
    assert "could not be" in caplog.text
    engine, published = make_engine(checkpoints["llama"])
    hand_over(engine, [submit("r", PROMPT, 8)])
    drain(engine)
    assert published.tokens["r"] == expected


def test_an_address_that_is_none_is_refused():
    for url in ("http://host:1", "lm://host", "lm://host:port", "lm://a b:1"):
        with pytest.raises(ValueError, match="lm://127"):
            EngineConfig(model="tiny-model", kv_remote_url=url)


def _closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"lm://127.0.0.1:{probe.getsockname()[1]}"
