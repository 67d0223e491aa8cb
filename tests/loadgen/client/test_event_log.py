"""Raw events are read in pieces, whole requests in each, and nothing depends on how large the pieces are."""

import tempfile
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.loadgen.client.event_log import (
    BYTES,
    CLOSED,
    DISPATCHED,
    NO_REQUEST,
    ROW_BYTES,
    SCHEMA,
    SENT,
    STARTED,
    compact_events,
    event_files,
    ordered_events,
    write_events,
)  # fmt: skip
from sojourn.loadgen.record import parse
from sojourn.loadgen.record.parse import build_client_table, events_by_request, read_records
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import save_schedule
from sojourn.metrics.run.segments import replace_in_pieces
from tests.loadgen.scenarios import log_of, scenario

EVENTS = st.lists(
    st.tuples(st.integers(NO_REQUEST, 12), st.just(5), st.just(BYTES), st.binary(max_size=40)), max_size=60
)


@settings(max_examples=40)
@given(events=EVENTS, cut=st.integers(1, 60), most_bytes=st.integers(1, 2000))
def test_pieces_hold_whole_requests_in_order_and_no_more_than_was_asked(events, cut, most_bytes):
    with tempfile.TemporaryDirectory() as folder:
        for begin in range(0, len(events), cut):
            write_events(Path(folder), log_of(events[begin : begin + cut]), begin)
        pieces = [piece.to_pylist() for piece in ordered_events(event_files(Path(folder)), most_bytes)]
        stamped = [event | {"seq": seq} for seq, event in enumerate(
            dict(zip(("index", "ns", "kind", "data"), event, strict=True)) for event in events)]  # fmt: skip
        assert [row for piece in pieces for row in piece] == sorted(stamped, key=lambda row: (row["index"], row["seq"]))
        for piece in pieces:
            sizes = [len(row["data"]) + ROW_BYTES for row in piece if row["index"] != piece[-1]["index"]]
            assert sum(sizes) < most_bytes
        assert all(before[-1]["index"] < after[0]["index"] for before, after in pairwise(pieces))
        assert [index for index, _ in events_by_request(event_files(Path(folder)))] == sorted(
            {row[0] for row in events}
        )


def recorded(run_dir: Path, num_requests: int, num_reads: int = 40) -> Path:
    """All requests are in flight together: their events come in turns."""
    chosen = scenario({"process": "at_once", "count": num_requests})
    run_dir.mkdir()
    save_schedule(run_dir, build_schedule(chosen, 0, "t"), chosen)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    reads = [head, b'data: {"choices": [{"text": "a"}]}\n\n', *[b": nothing\n\n"] * num_reads, b"data: [DONE]\n\n"]
    events, seq = [(NO_REQUEST, 0, STARTED, b"")], 0
    for step, (kind, data) in enumerate(
        [(DISPATCHED, b""), (SENT, b""), *((BYTES, each) for each in reads), (CLOSED, b"")]
    ):
        events += [(index, step, kind, data) for index in range(num_requests)]
        if step % 8 == 7:
            write_events(run_dir, log_of(events), seq)
            events, seq = [], seq + len(events)
    write_events(run_dir, log_of(events), seq)
    return run_dir


@pytest.mark.parametrize("most_bytes", [1, 5_000, 2**28])
def test_records_are_the_same_however_much_is_read_at_once(tmp_path, monkeypatch, most_bytes):
    whole = read_records(recorded(tmp_path / "whole", 30))
    monkeypatch.setattr(ordered_events, "__defaults__", (most_bytes,))
    monkeypatch.setattr(parse, "RECORDS_AT_ONCE", 7)
    run_dir = recorded(tmp_path / "pieces", 30)
    parsed = build_client_table(run_dir)
    assert read_records(run_dir) == whole and {record.status for record in whole} == {"ok"}
    assert (parsed.num_records, parsed.num_unfinished, len(parsed.streams)) == (30, 0, 30)
    assert pq.read_table(run_dir / "client.parquet").column("request_id").to_pylist() == [
        each.request_id for each in whole
    ]


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_events_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ordered_events, "__defaults__", (20_000,))
    monkeypatch.setattr(parse, "EVENTS_AT_ONCE", 256)
    monkeypatch.setattr(parse, "RECORDS_AT_ONCE", 16)
    peaks = []
    for num_requests in (60, 480):
        run_dir = recorded(tmp_path / str(num_requests), num_requests)
        held = pa.total_allocated_bytes()
        assert max(pa.total_allocated_bytes() - held for _ in ordered_events(event_files(run_dir))) < 600_000
        tracemalloc.start()
        build_client_table(run_dir)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 420 * 4_000  # what is scheduled; events as objects would be 420 * 45 * 250 bytes


def test_file_of_an_older_run_and_one_that_was_not_cleared_away_are_read(tmp_path):
    """Its bytes had 32-bit offsets. Whoever was killed between writing the whole and removing the parts left both."""
    run_dir = recorded(tmp_path / "run", 4)
    parts = event_files(run_dir)
    whole = pa.concat_tables(list(ordered_events(parts)))
    old = SCHEMA.set(SCHEMA.get_field_index("data"), pa.field("data", pa.binary()))
    assert pa.types.is_large_binary(SCHEMA.field("data").type)
    replace_in_pieces(run_dir / "client_raw.parquet", old, [whole.cast(old)], holds=parts)
    assert event_files(run_dir) == [run_dir / "client_raw.parquet"]
    assert pa.concat_tables(list(ordered_events(event_files(run_dir)))).equals(whole)
    compact_events(run_dir)
    assert event_files(run_dir) == [run_dir / "client_raw.parquet"] and not (run_dir / "client_raw.parts").exists()
