"""Tables under way: a reader takes what is whole, wherever the writer was killed, and no row twice."""

import errno
import logging
import os
import shutil
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNTS, Account
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import SCHEMAS, columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.outage import SETTLED_SECONDS, WriteOutage
from sojourn.metrics.run.recorder import Recorder
from sojourn.metrics.run.segments import (
    FORMER_NAMES,
    StreamSegment,
    compact,
    discard_segments,
    read_segment,
    sources,
    write_segment,
)
from sojourn.metrics.whole_file import write_whole
from tests.metrics.random_records import random_request, random_step


def records(first: int, count: int) -> list[RequestRecord]:
    return [random_request(Random(index), index) for index in range(first, first + count)]


def requests(first: int, count: int) -> pa.Table:
    return columns("requests", records(first, count))


def stream(path, *frames: list[RequestRecord]) -> StreamSegment:
    segment = StreamSegment(path, SCHEMAS["requests"])
    for frame in frames:
        segment.append(columns("requests", frame))
    return segment


def test_a_stream_is_read_while_it_grows(tmp_path):
    path = tmp_path / "requests.parts" / "0.arrows"
    segment = stream(path)
    assert len(read_segment(path, "requests")) == 0
    for batches in range(1, 4):
        segment.append(requests(10 * batches, 5))
        assert len(read_segment(path, "requests")) == len(RunDirectory(tmp_path).table("requests")) == 5 * batches
    segment.close()
    assert read_segment(path, "requests").slice(5, 5).equals(requests(20, 5))


def test_a_stream_that_was_cut_anywhere_gives_the_batches_before_the_cut(tmp_path):
    path, parts = tmp_path / "0.arrows", [records(0, 3), records(3, 3), records(6, 3)]
    ends = []
    segment = stream(path)
    for part in parts:
        segment.append(columns("requests", part))
        ends.append(path.stat().st_size)
    segment.close()
    whole = path.read_bytes()
    near = {end + step for end in ends for step in (-1, 0, 1)}
    for length in sorted(near & set(range(len(whole) + 1)) | {*range(0, len(whole), 97), len(whole)}):
        path.write_bytes(whole[:length] + bytes(64) * (length in ends))  # the power went, too
        kept = sum(end <= length for end in ends)
        expected = requests(0, 3 * kept) if kept else SCHEMAS["requests"].empty_table()
        assert read_segment(path, "requests").equals(expected), length


def test_compaction_makes_one_file_of_all_kinds_of_segments(tmp_path):
    write_segment(tmp_path, "requests", requests(0, 2).to_pylist(), "0")
    stream(tmp_path / "requests.parts" / "1.arrows", records(2, 2), records(4, 1)).close()
    compact(tmp_path, "requests")
    assert [path.name for path in sources(tmp_path, "requests")] == ["requests.parquet"]
    assert not (tmp_path / "requests.parts").exists()
    stream(tmp_path / "requests.parts" / "2.arrows", records(5, 2)).close()  # the run went on
    compact(tmp_path, "requests")
    assert pq.read_table(tmp_path / "requests.parquet").equals(requests(0, 7))


def test_killed_between_the_whole_and_the_removal_no_row_is_read_twice(tmp_path, monkeypatch):
    stream(tmp_path / "requests.parts" / "1.arrows", records(0, 3)).close()
    monkeypatch.setattr("sojourn.metrics.run.segments.discard_segments", lambda *told: None)
    compact(tmp_path, "requests")
    run = RunDirectory(tmp_path)
    assert len(run.sources("requests")) == 1 and len(run.table("requests")) == 3
    stream(tmp_path / "requests.parts" / "2.arrows", records(3, 2)).close()  # a second life of the server
    assert len(run.sources("requests")) == 2 and len(run.table("requests")) == 5
    monkeypatch.setattr("sojourn.metrics.run.segments.discard_segments", discard_segments)
    compact(tmp_path, "requests")
    assert len(run.table("requests")) == 5 and not (tmp_path / "requests.parts").exists()


def test_an_older_run_lacks_columns_whatever_its_segments_are(tmp_path):
    old = requests(0, 2).drop_columns(["waits", "computed_tokens"])
    (tmp_path / "requests.parts").mkdir()
    pq.write_table(old, tmp_path / "requests.parts" / "0.parquet")
    stream(tmp_path / "requests.parts" / "1.arrows", records(2, 2)).close()
    table = RunDirectory(tmp_path).table("requests")
    assert len(table) == 4 and set(SCHEMAS["requests"].names) <= set(table.columns)
    assert table.computed_tokens.isna().tolist() == [True, True, False, False]


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_steps_are_taken_up_to_the_capacity(tmp_path, beyond):
    recorder = Recorder(tmp_path, ("steps",), capacity=10)
    recorder._closing.set()  # the writer stops, so that nothing empties the ring
    recorder._thread.join()
    steps = [random_step(Random(1), index) for index in range(10 + beyond)]
    recorder.extend("steps", steps[:6])
    recorder.extend("steps", steps[6:])
    assert recorder.dropped == max(0, beyond)
    recorder.close()
    assert len(RunDirectory(tmp_path).table("steps")) == min(10, 10 + beyond)


def test_after_a_disk_that_failed_the_recorder_begins_another_segment(tmp_path, caplog):
    recorder = Recorder(tmp_path, ("requests",))
    recorder.append("requests", random_request(Random(1), 1))
    recorder.flush()
    segment = recorder._segments["requests"]
    segment._file.close()  # as if the disk were gone
    recorder.append("requests", random_request(Random(2), 2))
    recorder.flush()
    assert recorder.failed == 1 and "table requests cannot be written" in caplog.text
    recorder.append("requests", random_request(Random(3), 3))
    recorder.close()
    assert len(list((tmp_path / "requests.parts").iterdir())) == 2
    assert len(RunDirectory(tmp_path).table("requests")) == 2 and recorder.failed == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_gets_no_file_a_second(tmp_path, monkeypatch):
    def open_full(path, mode, buffering):
        path.touch(exist_ok=False)
        return open("/dev/full", "wb", buffering=buffering)

    recorder = Recorder(tmp_path, ("requests",))
    recorder._closing.set()  # the writer stops, so that only we flush
    recorder._thread.join()
    monkeypatch.setattr(Path, "open", open_full)
    for index in range(3):
        recorder.append("requests", random_request(Random(index), index))
        recorder.flush()
    assert recorder.failed == 3 and not list((tmp_path / "requests.parts").iterdir())
    monkeypatch.undo()
    recorder.append("requests", random_request(Random(3), 3))
    recorder.close()
    assert len(RunDirectory(tmp_path).table("requests")) == 1


@pytest.mark.parametrize("damage", ["no message", "no batch"])
def test_a_segment_that_cannot_be_read_is_told_in_a_sentence(tmp_path, damage):
    path = tmp_path / "requests.parts" / "0.arrows"
    stream(path, records(0, 1)).close()
    content = path.read_bytes()
    if damage == "no message":
        path.write_bytes(content + b"\x10\0\0\0\x20\0\0\0" + bytes(16))
    else:
        path.write_bytes(content[:-2000] + b"\xff" * 2000)
    with pytest.raises(RunDataError, match="table requests cannot be read"):
        RunDirectory(tmp_path).table("requests")


def test_a_segment_of_the_older_format_is_refused_and_not_passed_over(tmp_path):
    path = tmp_path / "requests.parts" / "0.packed"
    path.parent.mkdir()
    path.write_bytes(b"")
    with pytest.raises(RunDataError, match=r"0\.packed is of an older version"):
        RunDirectory(tmp_path).table("requests")
    with pytest.raises(RunDataError, match="older version"):
        compact(tmp_path, "requests")
    assert path.exists()


def test_a_reader_that_is_overtaken_by_the_compaction_reads_the_whole(tmp_path, monkeypatch):
    stream(tmp_path / "requests.parts" / "0.arrows", records(0, 3)).close()
    run, listed = RunDirectory(tmp_path), []

    def sources_then_compact(directory, table):
        if table != "requests":
            return []
        listed.append(sources(directory, table))
        if len(listed) == 1:
            compact(directory, table)
        return listed[-1]

    monkeypatch.setattr("sojourn.metrics.run.directory.sources", sources_then_compact)
    assert len(run.table("requests")) == 3 and len(listed) == 2


def written_with(path: Path, rows: pa.Table) -> Path:
    """A segment of a version that had these columns."""
    segment = StreamSegment(path, rows.schema)
    segment.append(rows)
    segment.close()
    return path


def test_steps_of_another_version_keep_what_both_know_and_the_rest_is_null(tmp_path):
    rows = columns("steps", [random_step(Random(index), index) for index in range(4)])
    other = rows.drop_columns("logit_rows").append_column("not_known_yet", pa.array([7] * 4))
    table = read_segment(written_with(tmp_path / "steps.parts" / "0.arrows", other), "steps")
    assert table["logit_rows"].null_count == 4
    assert table.drop_columns("logit_rows").equals(rows.drop_columns("logit_rows"))


def test_ledgers_of_another_version_keep_each_account_under_its_name(tmp_path):
    rows, lost = requests(0, 3), ACCOUNTS[Account.REQUEST_LOST].column
    unknown = [f"{book}_{lost}" for book in ("ledger", "ttft")]
    other = rows.select([*reversed(rows.column_names)]).drop_columns(unknown)
    other = other.append_column("ledger_not_known_yet_ns", pa.array([7] * 3))
    table = read_segment(written_with(tmp_path / "requests.parts" / "0.arrows", other), "requests")
    assert [table[name].null_count for name in unknown] == [3, 3]
    assert table.drop_columns(unknown).equals(rows.drop_columns(unknown))


@pytest.mark.parametrize("suffix", [".arrows", ".parquet"])
def test_columns_of_an_older_run_are_read_under_the_names_of_today(tmp_path, suffix):
    rows = columns("steps", [random_step(Random(index), index) for index in range(4)])
    older = rows.rename_columns({new: old for new, old in FORMER_NAMES["steps"].items()})
    path = tmp_path / "steps.parts" / f"0{suffix}"
    if suffix == ".arrows":
        written_with(path, older)
    else:
        path.parent.mkdir()
        pq.write_table(older, path)
    written_with(tmp_path / "steps.parts" / "1.arrows", rows)  # the server was updated, and the run went on
    assert RunDirectory(tmp_path).arrow("steps").equals(pa.concat_tables([rows, rows]))
    compact(tmp_path, "steps")
    assert pq.read_table(tmp_path / "steps.parquet").equals(pa.concat_tables([rows, rows]))


def one_written(folder: Path) -> Recorder:
    """A recorder that has written one row, and writes on only when it is flushed."""
    recorder = Recorder(folder, ("requests",))
    recorder._closing.set()
    recorder._thread.join()
    recorder.append("requests", random_request(Random(1), 1))
    recorder.flush()
    return recorder


@pytest.mark.parametrize("removed", ["run", "run/requests.parts"])
def test_a_folder_that_was_removed_is_counted_logged_once_and_made_again(tmp_path, caplog, removed):
    recorder = one_written(tmp_path / "run")
    shutil.rmtree(tmp_path / removed)
    recorder.flush()  # without a new record, too
    assert recorder.failed == 1 and "their file was removed" in caplog.text
    for index in (2, 3):
        recorder.append("requests", random_request(Random(index), index))
        recorder.flush()
    recorder.close()
    assert recorder.failed == 1 and len(caplog.records) == 1
    assert len(RunDirectory(tmp_path / "run").table("requests")) == 2


def test_a_file_that_was_moved_or_replaced_is_counted_and_left_alone(tmp_path):
    for change in (lambda file: file.rename(tmp_path / "moved"), lambda file: file.with_suffix(".x").rename(file)):
        recorder = one_written(tmp_path / "run")
        file = recorder._segments["requests"]._path
        file.with_suffix(".x").touch()
        change(file)
        recorder.close()
        assert recorder.failed == 1


def test_an_outage_is_logged_when_it_begins_and_when_it_has_settled(caplog):
    now = [100.0]
    outage = WriteOutage(logging.getLogger("disk"), "it works", clock=lambda: now[0])
    outage.end()
    for second in range(3):
        now[0] = 100.0 + second
        outage.begin("full")
    for second, lines in ((SETTLED_SECONDS - 0.1, ["full"]), (SETTLED_SECONDS, ["full", "it works again; 2 lost"])):
        now[0] = 102.0 + second
        outage.end("2 lost")
        assert caplog.messages == lines
    outage.end("2 lost")
    outage.begin("full")
    assert caplog.messages[2:] == ["full"]


def test_a_table_that_does_not_fit_leaves_no_part_of_itself(tmp_path, monkeypatch):
    stream(tmp_path / "requests.parts" / "1.arrows", records(0, 3)).close()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        compact(tmp_path, "requests")
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "run.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["requests.parts"]
    assert len(RunDirectory(tmp_path).table("requests")) == 3
