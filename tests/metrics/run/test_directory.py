"""Records survive the way to disk and back, and the ledger of client and server closes."""

import json
import math
import random

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNTS, SERVER_ACCOUNTS, Account, closes, new_ledger
from sojourn.metrics.records import ClientRecord, RequestRecord, StepRecord
from sojourn.metrics.records.tables import SCHEMAS, columns, row
from sojourn.metrics.run.directory import REQUIRED, RunDirectory
from sojourn.metrics.run.recorder import Recorder
from tests.metrics.random_records import random_request, random_step

MS = 1_000_000


def step(index: int, **changes) -> StepRecord:
    values = dict(
        step=index, begin_ns=index * MS, end_ns=(index + 1) * MS, stages=[0, 0, 0, 0, MS, 0, 0, 0], device_ns=MS,
        request_ids=["a"], new_tokens=[1], past_tokens=[index], kinds=["decode"], padding_tokens=0, graph="eager",
        budget=64, waiting=1, refusals={"kv_blocks": 1}, preempted_ids=[], evicted_blocks=0, blocks_free=3,
        blocks_active=1, blocks_reusable=0, flops=10, bytes=20, predicted_ns=None,
    )  # fmt: skip
    return StepRecord.of(**(values | changes))


def closed_pair() -> tuple[ClientRecord, RequestRecord]:
    """A request whose accounts are known: 1 ms each, in the order in which they happen."""
    ledger = new_ledger()
    for info in SERVER_ACCOUNTS:
        ledger[info.account] = MS
    served = len(SERVER_ACCOUNTS) * MS
    due, sent, arrived = 0, 1 * MS, 2 * MS
    client = ClientRecord(
        request_id="a", scenario="s", due_ns=due, status="ok", sent_ns=sent, first_token_ns=arrived + served + MS,
        last_byte_ns=arrived + served + MS, output_tokens=1, chunk_ns=[arrived + served + MS], chunk_tokens=[1],
    )  # fmt: skip
    server = RequestRecord(
        request_id="a", arrived_ns=arrived, finished_ns=arrived + served, written_ns=arrived + served,
        first_written_ns=arrived + served, finish_reason="stop", output_tokens=1, ledger=ledger, ttft=list(ledger),
    )  # fmt: skip
    return client, server


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", {key: None for key in REQUIRED})


def record(run: RunDirectory, **tables) -> None:
    recorder = Recorder(run.path, tuple(tables))
    for table, records in tables.items():
        recorder.extend(table, records)
    recorder.close()


def test_accounts_stand_in_the_order_of_their_positions():
    assert [info.account for info in ACCOUNTS] == list(Account)


def test_step_records_survive_the_way_to_disk(run):
    record(run, steps=[step(0), step(1, predicted_ns=7)])
    steps = run.table("steps")
    assert list(steps.columns) == SCHEMAS["steps"].names
    assert list(steps.step) == [0, 1]
    assert steps.stage_wait_ns.tolist() == [MS, MS]
    assert dict(steps.refusals[0]) == {"kv_blocks": 1}
    assert list(steps.request_ids[0]) == ["a"]


@pytest.mark.parametrize("make", [random_step, random_request], ids=["steps", "requests"])
def test_columns_hold_what_the_rows_do(make):
    dice = random.Random(1)
    records = [make(dice, number) for number in range(40)]
    table = "steps" if make is random_step else "requests"
    assert columns(table, records).equals(pa.Table.from_pylist([row(record) for record in records], SCHEMAS[table]))


def test_joined_request_closes_and_a_planted_gap_shows(run):
    client, server = closed_pair()
    record(run, client=[client], requests=[server])
    row = run.requests().iloc[0]
    assert row.unaccounted_ns == 0 and row.ttft_unaccounted_ns == 0
    assert row.ledger_client_lag_ns == MS and row.ledger_client_network_ns == 2 * MS
    assert not closes(2 * MS, 50 * MS)


def test_byte_read_before_the_server_looked_at_the_clock_makes_no_account_negative(run):
    client, server = closed_pair()
    late = msgspec.structs.replace(server, written_ns=client.last_byte_ns + MS // 2)
    late.ledger[Account.REQUEST_STREAM] += MS + MS // 2  # booked up to its own reading
    record(run, client=[client], requests=[late])
    row = run.requests().iloc[0]
    assert row.unaccounted_ns == 0
    assert row.ledger_request_stream_ns == 2 * MS and row.ledger_client_network_ns == MS


def test_run_from_before_an_account_was_introduced_closes_without_it(run):
    client, server = closed_pair()
    for booked in (server.ledger, server.ttft):
        booked[Account.REQUEST_STREAM] += booked[Account.REQUEST_LOST]
        booked[Account.REQUEST_LOST] = 0
    record(run, client=[client], requests=[server])
    run.compact()
    file = run.path / "requests.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["ledger_request_lost_ns", "ttft_request_lost_ns"]), file)
    row = run.requests().iloc[0]
    assert row.unaccounted_ns == row.ttft_unaccounted_ns == 0
    assert row.ledger_request_lost_ns == 0


def test_request_without_a_server_record_keeps_its_row_and_claims_no_account(run):
    client, _ = closed_pair()
    record(run, client=[client])
    row = run.requests().iloc[0]
    assert row.ttft_ms > 0
    assert row.isna()["unaccounted_ns"]


def test_segments_are_read_while_the_run_goes_on_and_compaction_changes_nothing(run):
    record(run, steps=[step(0)])
    record(run, steps=[step(1)])
    before = run.table("steps")
    run.compact()
    assert [path.name for path in run.sources("steps")] == ["steps.parquet"]
    assert before.sort_values("step").step.tolist() == run.table("steps").step.tolist()
    record(run, steps=[step(2)])
    assert len(run.table("steps")) == 3


def test_half_written_segment_is_not_read(run):
    record(run, steps=[step(0)])
    (run.path / "steps.parts" / ".00000001-00000009.tmp").write_bytes(b"PAR1 cut off")
    assert len(run.table("steps")) == 1


def test_recorder_counts_what_it_drops_and_what_the_disk_refuses(tmp_path, caplog):
    recorder = Recorder(tmp_path / "run", ("steps",), capacity=2)
    recorder._closing.set()  # the writer stops, so that nothing empties the ring
    recorder._thread.join()
    for index in range(5):
        recorder.extend("steps", [step(index)])
    assert recorder.dropped == 3
    (tmp_path / "run").write_text("a file where the folder should be")
    recorder.flush()
    assert recorder.failed == 2 and "table steps cannot be written" in caplog.text


@pytest.mark.parametrize("beyond", [-1, 0, 1, 5])
def test_ring_counts_what_exceeds_its_capacity_and_has_room_again_once_written(tmp_path, beyond):
    capacity = 4
    recorder = Recorder(tmp_path, ("requests", "steps"), capacity)
    recorder._closing.set()  # the writer stops, so that nothing empties the ring
    recorder._thread.join()
    for index in range(capacity + beyond):
        recorder.extend("steps", [step(index)])
    assert recorder.dropped == max(0, beyond)
    recorder.flush()
    for index in range(capacity):  # room again; and each table has a ring of its own
        recorder.extend("steps", [step(100 + index)])
    assert recorder.dropped == max(0, beyond) and recorder.failed == 0
    recorder.close()
    exporter = Exporter("m")
    exporter.observe_recorder(recorder.dropped, recorder.failed)
    assert (
        f'sojourn_telemetry_dropped_records_total{{model_name="m"}} {float(max(0, beyond))}'
        in exporter.render().decode()
    )
    kept = [*range(min(capacity, capacity + beyond)), *range(100, 100 + capacity)]
    assert [*RunDirectory(tmp_path).table("steps").step] == kept


def test_a_record_that_no_column_holds_is_counted_and_does_not_end_the_writer(tmp_path, caplog):
    recorder = Recorder(tmp_path, ("requests",))
    for tenant in ("half a character: \ud800", "whole"):
        recorder.append("requests", RequestRecord("r", 1, 2, tenant=tenant))
        recorder.flush()
    recorder.close()
    assert recorder.failed == 1 and "surrogates not allowed" in caplog.text
    assert RunDirectory(tmp_path).table("requests").tenant.tolist() == ["whole"]


def test_folder_without_a_run_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(RunDataError, match=r"holds no run\.json"):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunDataError, match="not a folder"):
        RunDirectory.open(tmp_path / "absent")


def test_run_is_never_written_over(run):
    with pytest.raises(RunDataError, match="already holds a run"):
        RunDirectory.create(run.path, {key: None for key in REQUIRED})


def answered(run: RunDirectory, chunk_ms: list[int], chunk_tokens: list[int], output_tokens: int) -> float:
    """`tpot_ms` of a request whose chunks were read at these moments."""
    stamps = [each * MS for each in chunk_ms]
    client = ClientRecord(
        request_id="a", scenario="s", due_ns=0, status="ok", sent_ns=0, first_token_ns=stamps[0],
        last_byte_ns=stamps[-1], output_tokens=output_tokens, chunk_ns=stamps, chunk_tokens=chunk_tokens,
    )  # fmt: skip
    record(run, client=[client])
    return run.requests().tpot_ms.iloc[0]


def test_time_per_output_token_is_unknown_where_all_tokens_came_in_one_read(run):
    assert math.isnan(answered(run, [50], [], 20))


def test_time_per_output_token_is_unknown_where_all_chunks_came_in_one_read(run):
    assert math.isnan(answered(run, [50, 50, 50], [1, 1, 1], 3))


@pytest.mark.parametrize(
    ("chunk_ms", "chunk_tokens", "tpot_ms"),
    [
        ([50, 80], [4, 2], 15.0),  # two tokens in the 30 ms after a first chunk of four
        ([50, 50, 80], [1, 3, 2], 15.0),  # the same in two chunks of one read
        ([50, 80], [], 6.0),  # nothing told of the chunks: five tokens after the first
    ],
)
def test_tokens_of_the_first_read_waited_for_no_other_token(run, chunk_ms, chunk_tokens, tpot_ms):
    assert answered(run, chunk_ms, chunk_tokens, 6) == tpot_ms


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[]", r"it holds \[\], but should be an object with scenario, seed"),
        (b"{}", "`scenario` is missing; it should be an object, or a name"),
        (b"\xff\xfe{", "is not UTF-8 text"),
        (b"[" * 100_000, "is not JSON"),
        ({"engine": "fast"}, '`engine` is "fast"; it should be an object'),
        ({"objectives": {"ttft_ms": 5}}, "`objectives` is .*; it should be a list of objects"),
        ({"objectives": ["fast"]}, r"`objectives\[0\]` is \"fast\"; it should be an object with bounds"),
        (
            {"objectives": [{"ttft_ms": "fast"}]},
            r"`objectives\[0\].ttft_ms` is \"fast\"; it should be a number above 0",
        ),
        ({"objectives": [{"tpot_ms": True}]}, r"`objectives\[0\].tpot_ms` is true; it should be a number above 0"),
    ],
)
def test_bad_run_document_is_refused_with_its_sentence(run, content, sentence):
    good = dict.fromkeys(REQUIRED)
    whole = content if isinstance(content, bytes) else json.dumps(good | content).encode()
    (run.path / "run.json").write_bytes(whole)
    with pytest.raises(RunDataError, match=sentence):
        RunDirectory.open(run.path)


def test_documents_hold_null_for_what_json_has_no_number_for(run):
    run.update_meta(client_error={"lag_p50_ms": math.nan, "worst": [math.inf, 1.5]})
    run.write_json("diagnosis.json", {"share": (math.nan,)})
    assert run.meta()["client_error"] == {"lag_p50_ms": None, "worst": [None, 1.5]}
    assert json.loads((run.path / "diagnosis.json").read_text()) == {"share": [None]}


def test_run_of_an_older_version_loads_with_its_missing_columns_null(run):
    record(run, steps=[step(0), step(1)])
    run.compact()
    file = run.path / "steps.parquet"
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["planned_ns", "preempted_for", "gap_ns"]), file)
    steps = run.table("steps")
    assert set(steps.columns) == set(SCHEMAS["steps"].names)
    assert steps.planned_ns.isna().all() and steps.gap_ns.dtype == "float64" and steps.preempted_for[0] is None
    assert run.arrow("steps")["planned_ns"].null_count == 2


def test_nanoseconds_are_exact_beside_nulls_however_long_the_machine_has_run(run):
    late_ns = 2**53 + 1
    record(run, steps=[step(0, planned_ns=late_ns), step(1)])
    for _ in range(2):
        assert run.table("steps").planned_ns[0] == late_ns and run.table("steps").planned_ns.isna().tolist()[1]
        run.compact()
