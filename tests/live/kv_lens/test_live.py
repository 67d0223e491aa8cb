"""A lens on live servers: real sockets, whatever they send; what it records is what it said."""

import http.server
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sojourn.live.kv_lens import session as sessions
from sojourn.live.kv_lens.addresses import endpoints_of
from sojourn.live.kv_lens.of_run import lens_of_run, recorded_events
from sojourn.live.kv_lens.session import LensSession, lens_once
from sojourn.live.kv_lens.sockets import KvEndpoint, check_endpoint
from sojourn.metrics.errors import InputError, RunDataError, ServerError
from sojourn.metrics.run.directory import RunDirectory
from tests.live.kv_lens.publisher import Publisher, batch, removed, stored

TOKEN = b"424242"


@contextmanager
def lens_on(*publishers: Publisher, replay: bool = True, **more):
    endpoints = [KvEndpoint(each.events, each.replay if replay else None) for each in publishers]
    session = LensSession(endpoints, **more).start()
    try:
        time.sleep(0.3)  # a subscription takes a moment, and PUB sends nothing before it
        yield session
    finally:
        session.stop()


def until(session: LensSession, condition) -> None:
    deadline = time.monotonic() + 10
    while not condition(session.lens()):
        assert time.monotonic() < deadline, session.lens()
        time.sleep(0.02)


@pytest.mark.parametrize("topic_in_answers", [True, False], ids=["vllm", "older"])
def test_history_lost_messages_and_what_comes_are_read_once(tmp_path, topic_in_answers):
    with Publisher(b"kv@pod", topic_in_answers=topic_in_answers) as publisher:
        publisher.publish(batch(stored([1, 2])))
        publisher.publish(batch(stored([3], 2), stored([10], medium="CPU")))
        with lens_on(publisher, run_dir=tmp_path / "run") as session:
            publisher.publish(batch(removed([3])), lose=True)
            publisher.publish(batch(stored([3], 2, session_id="chat")))
            until(session, lambda lens: lens.pools and lens.pools[-1].stored == 4)
        lens = session.lens()
        device = {pool.medium: pool for pool in lens.pools}["GPU"]
        assert (device.held, device.stored_again, device.removed, device.lost_messages) == (3, 1, 1, 0)
        assert [(pool.medium, pool.held) for pool in lens.pools] == [("CPU", 1), ("GPU", 3)]
        assert publisher.questions == [0, 2] and not lens.warnings
        assert [(each.name, each.kind, each.missed_tokens) for each in lens.takers] == [("chat", "session", 16)]
        again = lens_of_run(RunDirectory.open(tmp_path / "run"))
        assert (again.headline, again.curve, again.pools) == (lens.headline, lens.curve, lens.pools)
        written = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
        assert TOKEN not in written
        assert [event.kind for event in recorded_events(RunDirectory.open(tmp_path / "run"))] == [
            "stored", "stored", "stored", "removed", "stored"
        ]  # fmt: skip


def test_without_replay_a_gap_is_a_warning_and_the_figures_are_lower_bounds():
    with Publisher() as publisher, lens_on(publisher, replay=False) as session:
        publisher.publish(batch(stored([1, 2])))
        publisher.publish(batch(removed([2])), lose=True)
        publisher.publish(batch(stored([2], 1)))
        until(session, lambda lens: lens.pools and lens.pools[0].stored == 3)
        lens = session.lens()
        assert lens.pools[0].lost_messages == 1 and lens.pools[0].held == 1
        assert any("1 message was lost" in each for each in lens.warnings)


def test_garbage_on_the_socket_costs_nothing_but_a_warning():
    with Publisher() as publisher, lens_on(publisher) as session:
        publisher.raw(b"hello")
        publisher.raw(b"", b"short", b"x")
        publisher.raw(b"", b"", b"", b"")
        publisher.publish(b"\x93\xff not msgpack")
        publisher.publish(batch({"type": "BlockMoved"}, stored([1])))
        publisher.publish(batch(stored([2]), seconds=float("nan")))
        until(session, lambda lens: lens.pools and lens.pools[0].held == 2)
        warnings = " ".join(session.lens().warnings)
        assert "4 messages" in warnings and "unknown type 'BlockMoved'" in warnings
        assert json.dumps(warnings), "no bytes of a stranger"


def test_a_server_that_begins_anew_holds_nothing_of_before():
    with Publisher() as publisher, lens_on(publisher) as session:
        publisher.publish(batch(stored([1, 2, 3])))
        publisher.publish(batch(stored([4], 3)))
        until(session, lambda lens: lens.pools and lens.pools[0].held == 4)
        publisher.begin_anew()
        publisher.publish(batch(stored([1])))
        until(session, lambda lens: lens.pools[0].cleared == 1)
        lens = session.lens()
        assert lens.pools[0].held == 1 and lens.pools[0].stored_again == 0 and lens.takers == []


def test_several_servers_have_pools_of_their_own():
    with Publisher() as one, Publisher() as other, lens_on(one, other) as session:
        one.publish(batch(stored([1, 2])))
        other.publish(batch(stored([1])))
        until(session, lambda lens: len(lens.pools) == 2)
        assert {pool.server: pool.held for pool in session.lens().pools} == {
            one.events.removeprefix("tcp://"): 2, other.events.removeprefix("tcp://"): 1,
        }  # fmt: skip


@contextmanager
def http_server(pages: dict[str, str]):
    """A server that answers with these pages."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write((page or "").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def vllm_page(queries: int, hits: int) -> str:
    return (
        f'# TYPE vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
        f'# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{{engine="0"}} {hits}\n'
        '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{num_gpu_blocks="4",block_size="16"} 1\n'
    )


def test_metrics_beside_the_events_give_hit_rates(tmp_path):
    """160 looked-up tokens, 32 hits. One block came back that was evicted last, one after a second one."""
    pages = {"/metrics": vllm_page(160, 32)}
    with http_server(pages) as url, Publisher() as publisher:
        publisher.publish(batch(stored([1, 2, 3])))
        publisher.publish(batch(removed([3]), stored([4])))
        publisher.publish(batch(removed([2]), stored([3])))
        publisher.publish(batch(removed([1]), stored([2])))
        with lens_on(publisher, metrics=[url], run_dir=tmp_path / "run") as session:
            until(session, lambda lens: lens.hit_rate is not None)
            lens = session.lens()
        again = lens_of_run(RunDirectory.open(tmp_path / "run"))
        for found in (lens, again):
            assert found.source == "events and metrics" and found.pool_blocks == 3 and not found.pool_is_peak
            assert found.hit_rate == 0.2 and found.infinite_hit_rate == 0.4
            assert [point.hit_rate for point in found.curve] == [0.2, *[0.4] * 7]
        assert "no /metrics" not in " ".join(lens.warnings)


def test_a_server_says_where_its_events_are():
    ours = {"num_kv_blocks": 64, "kv_events": {"endpoint": "tcp://0.0.0.0:5557", "replay_endpoint": "tcp://*:5558",
                                               "topic": "t"}}  # fmt: skip
    sglang = {"kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 7000, "dp_size": 2,
                            "topic": "", "replay_endpoint_port_base": 7100}}  # fmt: skip
    with http_server({"/server_info": json.dumps(ours)}) as url:
        assert endpoints_of(url) == [KvEndpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "t", 64)]
    with http_server({"/server_info": json.dumps(sglang)}) as url:
        assert endpoints_of(url) == [
            KvEndpoint("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7100"),
            KvEndpoint("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7101"),
        ]
    for page in ("{}", "[]", "no JSON", '{"kv_events": null}', '{"kv_events": {}}'):
        with http_server({"/server_info": page}) as url, pytest.raises(ServerError, match="does not say where"):
            endpoints_of(url)


def test_once_is_a_lens_after_some_seconds():
    with Publisher() as publisher:
        publisher.publish(batch(stored([1, 2, 3])))
        lens = lens_once([KvEndpoint(publisher.events, publisher.replay)], seconds=0.5)
    assert lens.pools[0].held == 3 and lens.headline.startswith("3 blocks were stored")


def test_addresses_that_are_not_there_are_sentences(tmp_path):
    for address in ("127.0.0.1:5557", "http://127.0.0.1:1", "tcp://", "tcp://host", "tcp://*:5557", "tcp://h:99999"):
        with pytest.raises(InputError, match=r"address|port"):
            check_endpoint(address)
    with pytest.raises(ServerError, match=r"no server publishes KV events at tcp://127\.0\.0\.1:1 "):
        check_endpoint("tcp://127.0.0.1:1")
    with pytest.raises(ServerError, match="is no socket"):
        check_endpoint(f"ipc://{tmp_path / 'nothing'}")
    with http_server({}) as url, pytest.raises(ServerError, match="does not speak ZeroMQ"):
        check_endpoint(url.replace("http", "tcp"))
    with Publisher() as publisher:
        (tmp_path / "taken").mkdir()
        RunDirectory.create(tmp_path / "taken", dict.fromkeys(
            ("scenario", "seed", "engine", "hardware", "versions", "wall_anchor", "objectives", "client_error", "valid")
        ))  # fmt: skip
        with pytest.raises(RunDataError, match="already holds a run"):
            LensSession([KvEndpoint(publisher.events)], run_dir=tmp_path / "taken")
        (tmp_path / "file").write_text("")
        with pytest.raises(RunDataError, match="cannot be made"):
            LensSession([KvEndpoint(publisher.events)], run_dir=Path(tmp_path / "file" / "run"))


def test_a_long_record_is_described_until_its_end(tmp_path, monkeypatch):
    """Its history is full after some seconds."""
    for name, value in (("HISTORY_SECONDS", 3), ("SCRAPE_SECONDS", 0.01), ("DESCRIBE_SECONDS", 0.02)):
        monkeypatch.setattr(sessions, name, value, raising=False)
    described = []
    monkeypatch.setattr(LensSession, "_describe", lambda self: described.append(len(self._seconds)))
    with Publisher() as publisher, lens_on(publisher, run_dir=tmp_path / "run"):
        until_s = time.monotonic() + 5
        while described.count(3) < 5 and time.monotonic() < until_s:
            time.sleep(0.02)
    assert described.count(3) >= 5
