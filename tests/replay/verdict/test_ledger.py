"""The ledger of predictions: whole lines from several writers, a score that counts each pair once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sojourn.metrics.prediction import Change
from sojourn.replay.verdict.ledger import Checked, LedgerEntry, append, ledger_beside, read, score


def entry(error: float = 0.1, hit: bool = True, run2: str = "b", cause: str = "", **change) -> LedgerEntry:
    figure = Checked(
        name="attainment", before=0.4, low=0.8, median=0.9, high=1.0, measured=0.9 + error, hit=hit, error=error
    )
    return LedgerEntry(
        when="2026-01-01T00:00:00+00:00", build="1", run="a", run2=run2, scenario="s", cause=cause,
        change=Change(settings=change or {"max_num_seqs": 18}), predicted_by="diagnosis", figures=[figure], hit=hit,
        error=error,
    )  # fmt: skip


def test_entries_come_back_in_order_and_a_cut_line_spoils_no_other(tmp_path):
    path = ledger_beside(tmp_path / "a")
    assert path == tmp_path / "predictions.jsonl" and read(path) == []
    append(path, entry(0.1))
    path.write_bytes(path.read_bytes() + b'{"when": "2026')  # its writer met a full disk
    append(path, entry(0.2))
    assert [each.error for each in read(path)] == [0.1, 0.2]


def test_two_writers_at_one_time_lose_no_line(tmp_path):
    path = tmp_path / "predictions.jsonl"

    def write(name: str) -> None:
        for number in range(200):
            append(path, entry(run2=f"{name}-{number}", cause="x" * 3000))

    with ThreadPoolExecutor(2) as pool:  # each line has a descriptor of its own, as those of two processes have
        list(pool.map(write, ("one", "two")))
    assert {each.run2 for each in read(path)} == {f"{name}-{n}" for name in ("one", "two") for n in range(200)}


def test_the_score_counts_the_latest_verdict_of_each_pair():
    entries = [entry(0.5, False), entry(-0.1, True), entry(0.3, False, run2="c"), entry(0.2, True, max_num_seqs=4)]
    total = score(entries)
    assert (total.predictions, total.hits) == (3, 2)
    assert total.hit_rate == pytest.approx(2 / 3)
    assert total.mean_error == pytest.approx((0.1 + 0.3 + 0.2) / 3) and total.worst_error == 0.3
    assert score([]).mean_error is None and score([]).hit_rate is None
