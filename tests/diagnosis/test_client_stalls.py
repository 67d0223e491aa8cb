"""A load generator that stands still, told from a slow network and from a front that holds its answers."""

import numpy as np
import pandas as pd
import pytest

from sojourn.diagnosis.client_stalls import client_stalls

MS = 1_000_000


def streams(delay_ms: float = 0.0, pause: tuple[float, float] = (0, 0), held: tuple[float, float] = (0, 0)):
    """Ten requests, one each 100 ms, with a token each 10 ms for half a second.

    `delay_ms` on the way to the client; in `pause` the client does nothing, in `held` the front writes nothing (ms).
    """
    rows = []
    for due in np.arange(0.0, 1000.0, 100.0):
        sent = pause[1] if pause[0] <= due < pause[1] else due
        made = sent + np.arange(10.0, 510.0, 10.0)
        written = np.where((made >= held[0]) & (made < held[1]), held[1], made) + delay_ms
        read = np.where((written >= pause[0]) & (written < pause[1]), pause[1], written)
        ends = {"first_written_ns": written[0] - delay_ms, "first_token_ns": read[0],
                "written_ns": written[-1] - delay_ms, "last_byte_ns": read[-1]}  # fmt: skip
        rows.append({"due_ns": due * MS, "sent_ns": sent * MS, "chunk_ns": (read * MS).tolist(),
                     "token_ns": (made * MS).tolist()} | {name: ms * MS for name, ms in ends.items()})  # fmt: skip
    return pd.DataFrame(rows)


def test_a_client_that_stands_still_neither_sends_nor_reads():
    found = client_stalls(rows := streams(pause=(410, 730)), by_tokens=False)
    assert len(found) == 1 and found.longest_ms == pytest.approx(320, abs=20)
    assert found.waited_share(rows, first=False) > 0.9


def test_without_anything_due_the_tokens_of_the_core_show_the_stall():
    rows = streams(pause=(1005, 1095))
    assert len(client_stalls(rows, by_tokens=False)) == 0
    assert len(client_stalls(rows, by_tokens=True)) == 1


@pytest.mark.parametrize("changed", [{"delay_ms": 200.0}, {"held": (410, 730)}])
def test_a_slow_network_and_a_held_front_are_no_stalls_of_the_client(changed):
    assert len(client_stalls(streams(**changed), by_tokens=False)) == 0
