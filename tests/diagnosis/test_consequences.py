"""A loss that follows from something else points at it: a full queue at what fills it, a client that gives up at what
is slow."""

from dataclasses import replace

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.metrics.records import ClientRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.segments import write_segment
from sojourn.replay.predictor import predictor_of
from tests.diagnosis.test_client_only import MS, START_NS, S, client_run, request
from tests.further import further
from tests.metrics.foreign import START_NS as FOREIGN_NS
from tests.metrics.foreign import Life, VllmPage, foreign_run
from tests.metrics.synthetic import PLANTS, Settings, synthetic_run

FULL = "HTTP 429: the queue is full"
LONGER = ("max_waiting", "larger limit", "longer queue")


def capped_run(path, rate_rps: float, max_waiting: int, ttft_ms: float):
    """Two batch slots on a device that has room for many more, behind a bounded queue."""
    bounds = ({"klass": "all", "ttft_ms": ttft_ms, "tpot_ms": 60.0, "source": "chosen for the test"},)
    settings = Settings(max_num_seqs=2, max_waiting=max_waiting)
    run = synthetic_run(path, plant=replace(PLANTS["small_batch_cap"], rate_rps=rate_rps, settings=settings,
                                            objectives=bounds), requests=120)  # fmt: skip
    run.update_meta(engine=run.meta()["engine"] | {"max_waiting": max_waiting})
    return run


# Refused and late in both orders: a strict SLO makes more requests late than lost, a patient one only lost.
@pytest.mark.parametrize(("rate_rps", "max_waiting", "ttft_ms"), [
    (12.0, 16, 4000.0), *further((8.0, 4, 4000.0), (8.0, 16, 500.0), (20.0, 16, 500.0), (20.0, 4, 4000.0)),
])  # fmt: skip
def test_full_queue_points_at_the_batch_cap_that_fills_it(tmp_path, rate_rps, max_waiting, ttft_ms):
    run = capped_run(tmp_path / "run", rate_rps, max_waiting, ttft_ms)
    for predictor in (None, predictor_of(run)):
        diagnosis = diagnose(run, predictor=predictor)
        first, *others = diagnosis.findings
        assert first.key == "batch_cap" and "Lost requests" in first.title and "capped at 2" in diagnosis.headline
        assert not any(words in first.fix.change for words in LONGER)
        if ttft_ms > 1000:  # else most are late, and the evidence is of the case in which it explains most
            assert any("the queue is full of requests that wait for this" in each.statement for each in first.evidence)
        near = [each for each in others if each.key == "queue_limit"]
        assert all(each.role == "alternative" and "batch_cap" in each.follows for each in near)


def test_queue_that_is_full_for_a_moment_is_no_consequence(tmp_path):
    """A crowd is refused, and the rest of the time nobody waits: the bound is what is wrong."""
    crowd = [request(n, 60.0, error=FULL if 20 <= n < 40 and n % 2 else None) for n in range(60)]
    moved = []
    for number, each in enumerate(crowd):  # the crowd in two seconds, the others in ten
        at_s = number / 4 if number < 20 else 5 + (number - 20) / 10 if number < 40 else 7 + (number - 40) / 4
        shift = START_NS + int(at_s * S) - each.due_ns
        stamps = {name: getattr(each, name) for name in ("due_ns", "sent_ns", "first_token_ns", "last_byte_ns")}
        moved.append(msgspec.structs.replace(
            each, chunk_ns=[ns + shift for ns in each.chunk_ns or []],
            **{name: ns + shift for name, ns in stamps.items() if ns is not None},
        ))  # fmt: skip
    diagnosis = diagnose(client_run(tmp_path / "run", moved), level="client")
    assert diagnosis.findings[0].key == "queue_limit" and "larger limit" in diagnosis.findings[0].fix.change


def test_client_alone_names_no_longer_queue_where_it_is_always_full(tmp_path):
    waits = [request(n, 2000.0 + 40 * (n % 7), error=FULL if n % 2 else None) for n in range(60)]
    diagnosis = diagnose(client_run(tmp_path / "run", waits), level="client")
    assert not any(words in each.fix.change for each in diagnosis.findings for words in LONGER)
    assert "all the time" in diagnosis.headline or diagnosis.findings[0].key in ("batch_cap", "overload")


def test_means_of_a_foreign_server_name_what_fills_its_queue(tmp_path):
    lives = [Life(due_s=0.25 * n, queue_s=2.0, prefill_s=0.05, decode_s=0.45) for n in range(60)]
    run = foreign_run(tmp_path / "run", lives, VllmPage(), kv_use=0.3,
                      objectives=[{"klass": "all", "ttft_ms": 9_000.0, "source": "chosen for the test"}])  # fmt: skip
    refused = [
        ClientRecord(f"lost{n}", "foreign", FOREIGN_NS + int(0.25 * n * S), "error", klass="chat", error=FULL,
                     sent_ns=FOREIGN_NS + int(0.25 * n * S) + MS, last_byte_ns=FOREIGN_NS + int(0.25 * n * S) + 2 * MS)
        for n in range(60)
    ]  # fmt: skip
    write_segment(run.path, "client", [row(record) for record in refused], "1")
    run.compact()
    first = diagnose(run).findings[0]
    assert first.key == "batch_cap" and first.title == "Lost requests" and "max-num-seqs" in first.fix.change
