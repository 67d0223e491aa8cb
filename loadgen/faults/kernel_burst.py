"""One burst of profiled steps in the middle of a run, so that it has records of kernels."""

import http.client
import json
import threading
from contextlib import suppress

from sojourn.loadgen.target.endpoint import Endpoint

STEPS = 30  # on a CPU they stop the loop for some 20 ms in all
TIMEOUT_S = 20.0


class KernelBurst:
    """Owns the thread that asks for the burst. A server that refuses it costs nothing but the records."""

    def __init__(self, after_s: float):
        self._after_s = after_s
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, endpoint: Endpoint) -> None:
        self._thread = threading.Thread(target=self._run, args=(endpoint,), name="kernel burst", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for a burst under way: its records must be written before the server stops."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)

    def _run(self, endpoint: Endpoint) -> None:
        if self._ending.wait(self._after_s):
            return
        connection = endpoint.connection(TIMEOUT_S)
        body = json.dumps({"steps": STEPS, "timeout_s": TIMEOUT_S / 2})
        headers = {"Content-Type": "application/json", **endpoint.own_headers()}
        with suppress(OSError, http.client.HTTPException):
            connection.request("POST", f"{endpoint.path}/debug/profile", body, headers)
            connection.getresponse().read()
        connection.close()
