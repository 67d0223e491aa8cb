"""What two hosts recorded of one load becomes one run, whose ledgers close as well as the clocks are known."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.terminal.report import render
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import SCHEMAS, columns, row
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.join import _STAMPS, adopt, clock_of, join_runs, uncertainty_sentence
from sojourn.metrics.run.segments import replace_table
from tests.metrics.synthetic import synthetic_run

S, MS = 1_000_000_000, 1_000_000
STAMPS = {
    "requests": ("arrived_ns", "finished_ns", "written_ns", "first_written_ns"),
    "steps": ("begin_ns", "end_ns", "planned_ns", "device_end_ns"),
    "system": ("ns",),
}


def apart(path, offset_ns: int, drift: float = 0.0, boots=("a", "b"), **run):
    """A run, and the same as two hosts would have recorded it: the server's clock is ahead by an offset."""
    whole = synthetic_run(path / "whole", **run)
    client, server = path / "client", path / "server"
    for folder, tables in ((client, ("client",)), (server, ("requests", "steps", "system"))):
        folder.mkdir()
        shutil.copy(whole.path / "run.json", folder / "run.json")
        for table in tables:
            shutil.copy(whole.path / f"{table}.parquet", folder / f"{table}.parquet")
    base = int(whole.table("requests").arrived_ns.min())

    def moved(ns: np.ndarray) -> np.ndarray:
        return ns + offset_ns + np.rint(drift * (ns - base)).astype("int64")

    for table, stamps in STAMPS.items():
        content = pq.read_table(server / f"{table}.parquet")
        for name in stamps:
            values = pa.array(moved(content[name].to_numpy()))
            content = content.set_column(content.column_names.index(name), name, values)
        if table == "requests":
            tokens = pa.array([moved(np.array(cell)).tolist() for cell in content["token_ns"].to_pylist()])
            content = content.set_column(content.column_names.index("token_ns"), "token_ns", tokens)
        pq.write_table(content, server / f"{table}.parquet")
    runs = RunDirectory.open(client), RunDirectory.open(server)
    for opened, boot in zip(runs, boots, strict=True):
        opened.update_meta(hardware={"boot_id": boot})
    return whole, *runs


@pytest.mark.parametrize(("offset_ns", "drift"), [(0, 0.0), (-7_000 * S, 0.0), (3 * S, 80e-6)])
def test_joined_run_is_the_run_that_one_host_would_have_recorded(tmp_path, offset_ns, drift):
    whole, client, server = apart(tmp_path, offset_ns, drift, requests=80)
    joined = join_runs(client, server)
    assert joined.matched == joined.of == 80 and not joined.same_host
    assert 0 < joined.uncertainty_ns < 2 * MS  # the way takes 0.2 ms there and back, and a chunk 60 us
    together, apart_ = whole.requests(), client.requests()
    steps, same = client.table("steps"), whole.table("steps")
    assert len(steps) == len(same)
    for name in STAMPS["steps"]:
        assert ((steps[name] - same[name]).abs() <= joined.uncertainty_ns).all(), name
    error = (apart_.arrived_ns - together.arrived_ns).abs()
    assert (error <= joined.uncertainty_ns).all()
    for info in ACCOUNTS:
        close = np.abs(apart_[f"ledger_{info.column}"] - together[f"ledger_{info.column}"])
        assert (close <= 2 * joined.uncertainty_ns).all(), info.name
    tokens = np.concatenate([np.subtract(a, b) for a, b in zip(apart_.token_ns, together.token_ns, strict=True)])
    assert np.abs(tokens).max() <= joined.uncertainty_ns
    assert clock_of(client.meta()) == joined


def test_every_stamp_of_a_request_moves_to_the_clients_clock_and_no_duration_does(tmp_path):
    stamps = ("arrived_ns", "encoded_ns", "queued_ns", "scheduled_ns", "first_written_ns", "written_ns", "finished_ns")
    record = RequestRecord(
        "r", token_ns=[17, 18], evicted_ago_ns=5, ledger=[3] * len(ACCOUNTS), waits={"step": 4},
        **{name: 10 + place for place, name in enumerate(stamps)},
    )  # fmt: skip
    segment = replace_table(tmp_path / "server" / "part.parquet", columns("requests", [record]))
    assert adopt(tmp_path, {"requests": [segment]}, 1_010, 1_010, lambda ns: ns + 1_000) == 1
    (moved,) = pq.read_table(tmp_path / "requests.parts" / "part.parquet").to_pylist()
    before = row(record)
    known = [name for name in SCHEMAS["requests"].names if name.endswith("_ns") and before[name] is not None]
    changed = {name for name in known if moved[name] != before[name]}
    assert changed == {*stamps, "token_ns"} and moved["token_ns"] == [1_017, 1_018]
    assert all(moved[name] == before[name] + 1_000 for name in stamps)


def test_every_column_of_nanoseconds_is_a_stamp_or_a_known_duration():
    durations = {"device_ns", "gap_ns", "sampling_ns", "predicted_ns", "evicted_ago_ns", "total_ns", "reuse_gap_ns",
                 "evicted_age_ns", "evicted_idle_ns", "encoding_ns", "decoding_ns", "writing_ns", "loop_turn_ns",
                 "loop_busy_ns", "load_ns", "store_ns", "load_predicted_ns", "recompute_predicted_ns", "draft_ns",
                 "rejected_ns", "tier_load_ns", "tier_store_ns", "communication_ns", "bubble_ns", "exchange_ns",
                 "exchange_hidden_ns", "rank_busy_ns", "rank_communication_ns", "rank_bubble_ns",
                 "transfer_ns"}  # fmt: skip
    durations |= {f"{process}_{name}_ns" for process in ("front", "core")
                  for name in ("loop_cpu", "loop_queued", "queued")}  # fmt: skip
    for table, stamps in _STAMPS.items():
        columns = {name for name in SCHEMAS[table].names if name == "ns" or name.endswith("_ns")}
        sums = {name for name in columns if name.startswith(("ledger_", "ttft_", "stage_"))}
        assert columns - sums - durations == set(stamps), table


def test_clients_that_gave_up_do_not_part_the_clocks(tmp_path):
    """The server computed on for a while, so its last token is later than anything that such a client read."""
    _, client, server = apart(tmp_path, 3 * S, requests=40)
    table = pq.read_table(client.path / "client.parquet").to_pylist()
    for place in range(0, len(table), 4):
        table[place] |= {"status": "timeout", "last_byte_ns": table[place]["first_token_ns"]}
    pq.write_table(pa.Table.from_pylist(table, schema=SCHEMAS["client"]), client.path / "client.parquet")
    assert abs(join_runs(client, server).offset.offset_ns - 3 * S) < 2 * MS


def test_uncertainty_is_said_wherever_the_network_is_shown(tmp_path):
    _, client, server = apart(tmp_path, 3 * S, requests=40, plant="slow_network")
    join_runs(client, server)
    sentence = uncertainty_sentence(client.meta())
    diagnosis = diagnose(client)
    assert "different hosts" in sentence and sentence in diagnosis.warnings
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(diagnosis))
    line = next(line for line in console.export_text().splitlines() if line.strip().startswith("client.network"))
    assert "± " in line and f"{diagnosis.clock_uncertainty_ms:.3f} ms" in line


def test_runs_of_one_host_share_their_clock(tmp_path):
    whole, client, server = apart(tmp_path, 0, boots=("a", "a"), requests=20)
    joined = join_runs(client, server)
    assert joined.same_host and joined.uncertainty_ns == 0 and uncertainty_sentence(client.meta()) == ""
    assert (client.requests().unaccounted_ns == whole.requests().unaccounted_ns).all()


def test_what_the_server_told_of_its_model_comes_along(tmp_path):
    _, client, server = apart(tmp_path, 0, requests=10)
    told = {"model_shape": {"vocab_size": 5}, "core": {"dtype": "float32"}, "ceilings": {"device": "x"}}
    server.update_meta(**told)
    join_runs(client, server)
    assert {key: client.meta()[key] for key in told} == told


def test_runs_that_do_not_belong_together_are_refused(tmp_path):
    _, client, server = apart(tmp_path, 0, requests=10)
    table = pq.read_table(server.path / "requests.parquet")
    names = pa.array([f"other-{name}" for name in table["request_id"].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("request_id"), "request_id", names),
                   server.path / "requests.parquet")  # fmt: skip
    with pytest.raises(RunDataError, match=r"no request of .* is among those"):
        join_runs(client, server)
    with pytest.raises(RunDataError, match="holds records of a server already"):
        join_runs(server, client)


def test_server_whose_clock_was_set_during_the_run_is_refused(tmp_path):
    _, client, server = apart(tmp_path, 0, requests=40)
    table = pq.read_table(server.path / "requests.parquet")
    arrived = table["arrived_ns"].to_numpy().copy()
    arrived[arrived > np.median(arrived)] -= 10 * S
    pq.write_table(table.set_column(table.column_names.index("arrived_ns"), "arrived_ns", pa.array(arrived)),
                   server.path / "requests.parquet")  # fmt: skip
    with pytest.raises(RunDataError, match="was a clock set during the run"):
        join_runs(client, server)
    assert not client.sources("requests"), "nothing was adopted"
