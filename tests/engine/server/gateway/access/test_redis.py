"""Several fronts count in one Redis. Needs Debian's redis-server."""

import asyncio
import shutil
import socket
import subprocess
import time

import pytest

from sojourn.engine.server.gateway.access.rate_limits import RateLimits, Reservation, Tokens
from sojourn.engine.server.gateway.access.rules import AccessFile, Tier

pytestmark = [pytest.mark.peer, pytest.mark.skipif(not shutil.which("redis-server"), reason="no redis-server")]


@pytest.fixture
def redis(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()


def test_two_fronts_share_their_counts(redis):
    async def check() -> None:
        file = AccessFile(default_tier="a", tiers={"a": Tier()}, storage=redis)
        failures = []
        one, two = (RateLimits(file, lambda: failures.append(1)) for _ in range(2))
        tier = Tier(requests_per_minute=3, tokens_per_minute=100)
        results = [await front.take_request("t", tier) for front in (one, two, one, two)]
        assert [result is None for result in results] == [True, True, True, False]
        assert 0 < results[-1].wait_seconds <= 60
        tokens = Tokens(20, 60)
        assert await one.reserve("t", tier, tokens) is None
        assert (await two.reserve("t", tier, tokens)).setting == "tokens_per_minute"
        await two.correct(Reservation(tier, "t", tokens, time.time()), Tokens(20, 10))
        levels = {level.unit: level.remaining for level in await one.levels("t", tier)}
        assert levels == {"requests": 0, "tokens": 70} and not failures

    asyncio.run(check())
