"""The tail of a probe's streams: it tells of the last seconds what the whole streams tell, and forgets the rest."""

import random

import pytest

from sojourn.interop.probe import tail as tails
from sojourn.interop.probe.folder import import_probe, run_of
from sojourn.interop.probe.tail import ProbeTail
from sojourn.metrics.ledger import SERVER_ACCOUNTS
from tests.probe.test_scheduler import folder, made, served, some_requests

__all__ = ["folder"]
COLUMNS = ["arrived_ns", "finished_ns", "waits", *(f"ledger_{info.column}" for info in SERVER_ACCOUNTS),
           "cached_tokens", "computed_tokens", "recomputed_tokens", "output_tokens", "preemptions"]  # fmt: skip


@pytest.mark.parametrize("blocks", [400, 16])
@pytest.mark.parametrize("kept", [0.1, 0.5])
def test_a_tail_tells_of_the_window_what_the_whole_stream_tells(folder, tmp_path, blocks, kept):
    served(made(blocks=blocks, max_num_seqs=4), some_requests(60))
    whole = import_probe(folder).table("requests").set_index("request_id")
    end_ns = whole.finished_ns.max()
    last_ns = end_ns - whole.finished_ns.nlargest(8).min() + 2_000_000  # a machine that stood still meanwhile
    keep_s = max(kept * (end_ns - whole.arrived_ns.min()), last_ns) / 1e9
    (stream,) = folder.glob("*.probe")
    tail, growing, draw = ProbeTail(tmp_path / "copy", keep_s), tmp_path / "copy" / stream.name, random.Random(3)
    growing.parent.mkdir()
    content = stream.read_bytes()
    for size in [*sorted(draw.sample(range(len(content)), 5)), len(content)]:  # cut within records, too
        growing.write_bytes(content[:size])
        streams = tail.read()
    _, tables = run_of(growing.parent, streams)
    rows = tables["requests"].to_pandas().set_index("request_id")
    ended = whole[whole.finished_ns >= end_ns - keep_s * 1e9 + 1_000_000].index
    assert 5 <= len(ended) <= len(rows) < len(whole) and len(streams[0].steps) < streams[0].steps[-1].number
    for name in COLUMNS:
        told, known = rows.loc[ended, name], whole.loc[ended, name]
        told, known = (each.map(lambda cell: dict(cell)) if name == "waits" else each for each in (told, known))
        assert list(told) == list(known), name


def test_a_request_that_takes_too_long_is_left_out_and_not_told_wrong(folder, monkeypatch):
    served(made(max_num_seqs=2), some_requests(40))
    whole = import_probe(folder).table("requests").set_index("request_id")
    longest_ns = int(whole.finished_ns.max() - whole.queued_ns.median())
    monkeypatch.setattr(tails, "LONGEST_S", longest_ns / 1e9)
    streams = ProbeTail(folder, 1e3).read()
    rows = run_of(folder, streams)[1]["requests"].to_pandas().set_index("request_id")
    assert 0 < len(rows) < 40 and (rows.arrived_ns >= tails.last_ns(streams[0]) - longest_ns).all()
    assert (rows.ledger_compute_decode_ns == whole.ledger_compute_decode_ns[rows.index]).all()


def test_a_stream_in_small_pieces_is_the_stream(folder):
    from sojourn.interop.probe.stream import StreamFile, read_stream

    served(made(), some_requests(10))
    (path,) = folder.glob("*.probe")
    file = StreamFile(path)
    while file.take(64):  # less than a record
        pass
    assert file.stream == read_stream(path)
