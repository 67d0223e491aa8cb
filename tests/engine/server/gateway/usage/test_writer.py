"""Usage files: rotation, a full disk, a removed folder; no line is lost while the disk takes it."""

import errno
import os
import shutil

import pytest

from sojourn.engine.server.gateway.usage.writer import UsageWriter
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.usage.files import usage_files
from sojourn.metrics.usage.reader import read_usage
from sojourn.metrics.usage.record import End, encode
from tests.metrics.usage.test_reader import record, writer

DAY = 86_400


def fill(server: UsageWriter, *numbers: int) -> None:
    for number in numbers:
        server.write(End(record(server.life, number, status="refused")))


def numbers(folder) -> list[int]:
    return sorted(int(found.call.rpartition("-")[2]) for found in read_usage(folder).records)


def test_another_file_begins_once_the_size_is_reached(tmp_path):
    head = (lambda server: (server._size, server))(writer(tmp_path / "probe"))
    line = len(encode(End(record(head[1].life, 1, status="refused")))) + 1
    for limit, files in ((head[0] + 3 * line + 1, 1), (head[0] + 3 * line, 2), (head[0] + 3 * line - 1, 2)):
        folder = tmp_path / str(limit)
        server = writer(folder, file_bytes=limit)
        fill(server, 1, 2, 3, 4)
        assert len(usage_files(folder)) == files and numbers(folder) == [1, 2, 3, 4]
        server.close()


def test_another_file_begins_on_another_day(tmp_path):
    now = [20_000.0 * DAY - 1]
    server = UsageWriter(tmp_path, 1 << 20, sync_each_line=True, clock=lambda: now[0])
    fill(server, 1)
    now[0] += 1
    fill(server, 2)
    assert [file.name.split("-")[1] for file in usage_files(tmp_path)] == ["20241003", "20241004"]
    assert numbers(tmp_path) == [1, 2] and server.close() is None


def test_lines_wait_for_a_disk_that_is_full_and_none_is_lost(tmp_path, monkeypatch, caplog):
    server = writer(tmp_path)
    fill(server, 1)
    with monkeypatch.context() as disk:
        taken = [10]  # bytes of the first line, then nothing

        def full(descriptor: int, content: bytes, write=os.write) -> int:
            if not taken:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, content[: taken.pop()])

        disk.setattr(os, "write", full)
        fill(server, 2, 3)
        assert server.failed == 2 and len(caplog.records) == 1 and "wait in memory" in caplog.text
    server.check()
    fill(server, 4)
    assert numbers(tmp_path) == [1, 2, 3, 4] and read_usage(tmp_path).unreadable_lines == 1
    assert server.close() is None


def test_what_never_reaches_the_disk_is_a_sentence_at_the_end(tmp_path, monkeypatch):
    server = writer(tmp_path)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    monkeypatch.setattr("sojourn.engine.server.gateway.usage.writer.MOST_WAITING", 2)
    fill(server, 1, 2, 3)
    assert server.close() == f"3 lines of usage could not be written to {tmp_path}"


@pytest.mark.parametrize("removed", ["folder", "file"])
def test_a_file_that_was_removed_is_counted_and_begun_anew(tmp_path, removed, caplog):
    server = writer(tmp_path / "usage")
    fill(server, 1)
    shutil.rmtree(tmp_path / "usage") if removed == "folder" else server._path.unlink()
    assert server.check() and server.failed == 1 and "was removed" in caplog.text
    assert not server.check()
    fill(server, 2)
    assert numbers(tmp_path / "usage") == [2]


def test_a_folder_that_cannot_be_written_is_refused_with_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDataError, match=r"usage cannot be written to .*; choose another --usage-dir"):
        writer(tmp_path / "file" / "usage")
