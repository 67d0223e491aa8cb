"""How long hostile grammars take to be refused, and what a stream beside them notices.

python -m bench.engines.hostile_grammars
"""

import json
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx

from tests.engine.server.openai.test_structured_output import HARMLESS, REFUSED
from tests.engine.server_process import Running, post, serving

TOKENS = 1500


def gaps_ms(server: Running) -> list[float]:
    """Milliseconds between the chunks of one stream."""
    body = {"model": "tiny-model", "prompt": "The function", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    stamps = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                stamps.append(time.perf_counter())
    return [(later - earlier) * 1e3 for earlier, later in pairwise(stamps)]


def percentiles(gaps: list[float]) -> str:
    ordered = sorted(gaps)
    p99 = ordered[int(len(ordered) * 0.99)]
    return f"p50 {statistics.median(ordered):.1f}, p99 {p99:.1f}, max {ordered[-1]:.1f} ms"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "tiny-model") as server:
        post(server, guided_choice=["warm"])
        gaps_ms(server)
        print(f"a stream alone:                    gaps {percentiles(gaps_ms(server))}")
        over, beside = threading.Event(), []

        def follow() -> None:
            while not over.is_set():
                beside.extend(gaps_ms(server))

        stream = threading.Thread(target=follow)
        stream.start()
        took = {}
        for name, (fields, _) in REFUSED.items():
            encoded = json.dumps({"model": "tiny-model", "prompt": "x", "max_tokens": 2} | fields)
            began = time.perf_counter()
            json_type = {"content-type": "application/json"}
            answer = httpx.post(f"{server.url}/v1/completions", content=encoded, headers=json_type, timeout=60)
            took[name] = (time.perf_counter() - began) * 1e3
            assert answer.status_code == 400
        for name, fields in HARMLESS.items():
            answer = post(server, max_tokens=20, temperature=1.0, **fields)
            if answer.status_code != 200:
                print(f"{name}: {answer.text}")
        over.set()
        stream.join()
        print(f"beside {len(REFUSED)} hostile grammars, one by one: gaps {percentiles(beside)}")
        for name, milliseconds in sorted(took.items(), key=lambda item: -item[1])[:8]:
            print(f"  refused in {milliseconds:6.1f} ms: {name}")


if __name__ == "__main__":
    main()
