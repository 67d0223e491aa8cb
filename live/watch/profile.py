"""A burst of profiled steps of a live server: POST /debug/profile of our engine."""

import json
from typing import Any

from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.live.watch.fetch import fetch
from sojourn.metrics.errors import ServerError

STEPS = 20
TIMEOUT_S = 30.0
ONLY_OURS = "vLLM and SGLang have no such call; their own profilers need a restart with a flag"


def can_profile(source: str | None) -> bool:
    return source == SOJOURN.key


def profile(base: str, steps: int = STEPS) -> dict[str, Any]:
    """Profiles the next steps and waits for the answer of the server. Raises ServerError with its sentence."""
    body = json.dumps({"steps": steps, "timeout_s": TIMEOUT_S / 2}).encode()
    status, answer = fetch(f"{base}/debug/profile", TIMEOUT_S, body)
    try:
        found = json.loads(answer)
        if status == 200:
            return found
        message = found["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {status}"
    raise ServerError(f"the server took no profile: {message}")
