"""The remote KV tier against LMCache's own cache server, which runs in its own environment: SOJOURN_LMCACHE_PYTHON."""

import os
import socket
import subprocess
import time

import pytest

from tests.engine.techniques.tiers.test_remote_tier import check_two_engines_share

PYTHON = os.environ.get("SOJOURN_LMCACHE_PYTHON")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_LMCACHE_PYTHON names no interpreter with lmcache"),
]


def test_two_engines_share_blocks_through_lmcache():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([PYTHON, "-m", "lmcache.v1.server", "127.0.0.1", str(port)])
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.2)
        check_two_engines_share("tiny-model", f"lm://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(20)
