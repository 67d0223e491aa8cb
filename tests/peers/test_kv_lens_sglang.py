"""SGLang's own prefix cache and publisher, on a CPU and without a server: what the lens makes of their events.

    SOJOURN_SGLANG_PYTHON=.../sglang/bin/python pytest -m peer tests/peers/test_kv_lens_sglang.py

That interpreter's environment has sglang and its Python dependencies.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from sojourn.live.kv_lens.session import LensSession
from sojourn.live.kv_lens.sockets import KvEndpoint
from tests.probe.test_blocks import prompts

PYTHON = os.environ.get("SOJOURN_SGLANG_PYTHON")
SCRIPT = Path(__file__).with_name("sglang_radix_cache.py")
SIZE, BLOCKS = 16, 30

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_SGLANG_PYTHON names no interpreter"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def hits_of(folder: Path, blocks: int) -> int:
    """Tokens that SGLang's cache of another size finds of the same prompts."""
    done = subprocess.run(
        [PYTHON, SCRIPT, folder / "prompts.json", str(blocks)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sum(json.loads(done.stdout.splitlines()[-1])["hits"])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(folder, what SGLang said, the lens)"""
    folder = tmp_path_factory.mktemp("sglang")
    texts = prompts(2, count=150, beginnings=14)
    (folder / "prompts.json").write_text(json.dumps(texts))
    events, replay = free_port(), free_port()
    server = subprocess.Popen(
        [PYTHON, SCRIPT, folder / "prompts.json", str(BLOCKS), f"tcp://*:{events}", f"tcp://*:{replay}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(folder / "log").open("w"), text=True,
    )  # fmt: skip
    try:
        line = next((line for line in server.stdout if line.startswith("{")), None)
        assert line, (folder / "log").read_text()[-3000:]
        endpoint = KvEndpoint(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        session = LensSession([endpoint], [], folder / "lens").start()  # all was published before: it asks
        try:
            deadline = time.monotonic() + 30
            while (
                not (lens := session.lens()).pools
                or len(lens.pools) < 1
                or lens.pools[0].held != json.loads(line)["held"]
            ):
                assert time.monotonic() < deadline, lens
                time.sleep(0.2)
        finally:
            session.stop()
    finally:
        server.stdin.close()
        server.wait(30)
    return folder, json.loads(line), session.lens()


def test_what_is_held_and_evicted_is_what_sglang_holds(served):
    _, said, lens = served
    (pool,) = lens.pools
    assert (pool.medium, pool.block_size, pool.removed_unknown, pool.lost_messages) == ("GPU", SIZE, 0, 0)
    assert pool.held == said["held"] and pool.peak <= BLOCKS and pool.removed > 300
    assert not lens.warnings
    assert all(taker.kind == "session" and taker.name.startswith("session-") for taker in lens.takers)


def test_larger_pools_save_what_larger_pools_of_sglang_hit(served):
    folder, said, lens = served
    asked = sum(map(len, json.loads((folder / "prompts.json").read_text())))
    saved = {point.ratio: point.saved_tokens for point in lens.curve}
    for ratio, blocks in ((2, 2 * BLOCKS), (4, 4 * BLOCKS), (None, 4000)):
        more = hits_of(folder, blocks) - sum(said["hits"])
        assert saved[ratio] / asked == pytest.approx(more / asked, abs=0.02), ratio
