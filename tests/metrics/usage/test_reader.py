"""Usage files → one record a call, wherever their writers were killed."""

import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.server.gateway.usage.writer import UsageWriter
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.usage.files import usage_files, usage_folder
from sojourn.metrics.usage.reader import read_usage
from sojourn.metrics.usage.record import Begin, End, Progress, UsageRecord, status_of

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def writer(folder: Path, file_bytes: int = 1 << 20) -> UsageWriter:
    return UsageWriter(folder, file_bytes, sync_each_line=False)


def record(life: str, number: int, **known) -> UsageRecord:
    return UsageRecord(call=f"{life}-{number}", request_id=f"r{number}", time=NOON, prompt_tokens=7, **known)


def kill(server: UsageWriter) -> None:
    """What the kernel does with the file of a process that is killed: it closes it, and so its lock is gone."""
    os.close(server._file)
    server._file = -1


LIVES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["begin", "progress", "end", "end again"]), st.integers(0, 4)), max_size=14),
        st.integers(0, 60),  # bytes of its last line that the kill cut off
        st.sampled_from([4096, 200]),  # size of a file
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=60)
@given(LIVES, st.booleans())
def test_each_call_that_began_is_read_once_with_its_last_end_or_as_interrupted(lives, in_one_file):
    with TemporaryDirectory() as name:
        folder, expected = Path(name), {}
        for events, cut_bytes, file_bytes in lives:
            server = writer(folder, file_bytes)
            calls: dict[int, list[tuple[str, int]]] = {}
            written: list[tuple[int, tuple[str, int]]] = []  # call and what it is once this line is there
            for serial, (event, number) in enumerate(events, 1):
                if event == "begin" and number not in calls:
                    server.write(Begin(record(server.life, number)))
                    written.append((number, ("interrupted", 0)))
                    calls[number] = []
                elif event == "progress" and number in calls:
                    server.write(Progress({f"{server.life}-{number}": (0, serial)}))
                    written.append((number, ("interrupted", serial)))
                elif event.startswith("end"):
                    ended = record(server.life, number, status="answered", output_tokens=serial)
                    server.write(End(ended))
                    written.append((number, ("answered", serial)))
                    calls.setdefault(number, [])
            kill(server)
            if cut_bytes and written:  # the last line is torn
                content = server._path.read_bytes()
                body = content.rstrip(b"\n").rpartition(b"\n")[2]
                if not body.startswith(b'{"line":"file"'):
                    server._path.write_bytes(content[: -min(cut_bytes + 1, len(body))])
                    written.pop()
            state: dict[int, tuple[str, int]] = {}
            for number, (status, tokens) in written:
                if state.get(number, ("", 0))[0] != "answered" or status == "answered":
                    state[number] = (status, tokens)
            expected |= {f"{server.life}-{number}": found for number, found in state.items()}
        if in_one_file:  # as if each server had gone on in the file of the one before
            whole = b"".join(file.read_bytes() for file in usage_files(folder))
            for file in usage_files(folder):
                file.unlink()
            (folder / "usage-20261123-000000000000-000001.jsonl").write_bytes(whole)
        for _ in range(2):  # reading changes nothing
            found = read_usage(folder).records
            assert {each.call: (each.status, each.output_tokens) for each in found} == expected
            assert len(found) == len(expected)


def test_a_call_without_an_end_is_open_while_its_server_lives(tmp_path):
    servers = [writer(tmp_path), writer(tmp_path)]  # two fronts, one folder
    for server in servers:
        server.write(Begin(record(server.life, 1)))
    assert {each.status for each in read_usage(tmp_path).records} == {"open"}
    kill(servers[0])
    statuses = {each.call: each.status for each in read_usage(tmp_path).records}
    assert statuses == {f"{servers[0].life}-1": "interrupted", f"{servers[1].life}-1": "open"}
    servers[1].write(End(record(servers[1].life, 1, status="cancelled")))
    servers[1].close()
    assert sorted(each.status for each in read_usage(tmp_path).records) == ["cancelled", "interrupted"]


def test_a_server_that_went_on_in_another_file_lives_still(tmp_path, monkeypatch):
    server = writer(tmp_path, file_bytes=200)
    server.write(Begin(record(server.life, 1)))
    listed = usage_files(tmp_path)

    def rotates_meanwhile(folder: Path, read=usage_files) -> list[Path]:
        found = read(folder)
        if found == listed:
            server.write(Begin(record(server.life, 2)))
        return found

    monkeypatch.setattr("sojourn.metrics.usage.reader.usage_files", rotates_meanwhile)
    found = read_usage(tmp_path).records
    assert len(usage_files(tmp_path)) == 2
    assert {each.call: each.status for each in found} == {f"{server.life}-1": "open", f"{server.life}-2": "open"}


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path):
    server = writer(tmp_path)
    server.write(End(record(server.life, 1, status="refused")))
    with server._path.open("ab") as file:
        file.write(b'{"line":"end","rec\n\n\xff\xfe\n[]\n')
    server.write(End(record(server.life, 2, status="refused")))
    read = read_usage(tmp_path)
    assert len(read.records) == 2 and read.unreadable_lines == 3


def test_a_folder_without_usage_is_refused_and_one_of_a_run_is_found(tmp_path):
    for folder, says in ((tmp_path, "holds no usage files"), (tmp_path / "none", "is not a folder")):
        with pytest.raises(RunDataError, match=says):
            usage_folder(folder)
    writer(tmp_path / "run" / "usage")
    assert usage_folder(tmp_path / "run") == usage_folder(tmp_path / "run" / "usage") == tmp_path / "run" / "usage"


@pytest.mark.parametrize(("http_status", "reached_core", "status"), [
    (200, True, "answered"), (200, False, "answered"), (499, True, "cancelled"), (499, False, "cancelled"),
    (400, False, "refused"), (400, True, "failed"), (429, False, "refused"), (503, False, "refused"),
    (503, True, "failed"), (500, False, "failed"), (500, True, "failed"),
])  # fmt: skip
def test_the_status_of_a_call_follows_from_its_answer(http_status, reached_core, status):
    assert status_of(http_status, reached_core) == status
