"""A process that takes a core, or the memory's bandwidth, from its machine until it is ended.

python -m sojourn.loadgen.faults.neighbour WORK DUTY FROM_S UNTIL_S
"""

import sys
import time

SLICE_S = 0.05  # of work and rest
COPIED_BYTES = 64 << 20  # more than a cache holds


def main(work: str, duty: float, from_s: float, until_s: float) -> None:
    begin = time.monotonic()
    if work == "memory":
        source, target = bytearray(COPIED_BYTES), bytearray(COPIED_BYTES)
    time.sleep(max(0.0, begin + from_s - time.monotonic()))
    while time.monotonic() < begin + until_s:
        end = time.monotonic() + duty * SLICE_S
        while time.monotonic() < end:
            if work == "memory":
                target[:] = source
        time.sleep((1 - duty) * SLICE_S)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:5]))
