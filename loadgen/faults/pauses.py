"""Stops a process again and again, and lets it go on. It goes on in any case when this one ends.

python -m sojourn.loadgen.faults.pauses PID PAUSE_MS EVERY_MS FROM_S UNTIL_S
"""

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType


def main(pid: int, pause_s: float, every_s: float, from_s: float, until_s: float) -> None:
    begin = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    with suppress(ProcessLookupError):
        try:
            time.sleep(max(0.0, begin + from_s - time.monotonic()))
            while time.monotonic() < begin + until_s:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(pause_s)
                os.kill(pid, signal.SIGCONT)
                time.sleep(every_s - pause_s)
        finally:
            os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    pause_ms, every_ms, from_s, until_s = map(float, sys.argv[2:6])
    main(int(sys.argv[1]), pause_ms / 1e3, every_ms / 1e3, from_s, until_s)
