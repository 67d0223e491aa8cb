"""The recorded scheduler: what it records, and that it never changes or harms the server that it is in."""

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from sojourn_probe.records import Handled
from sojourn_probe.writer import begin

from sojourn.diagnosis.diagnose import diagnose
from sojourn.interop.probe.folder import import_probe
from sojourn.interop.probe.stream import read_streams
from sojourn.metrics.ledger import SERVER_ACCOUNTS, TEXT_ACCOUNTS
from sojourn.metrics.records import STAGES
from sojourn.metrics.request.blame import matrix, waited_ns
from sojourn.metrics.request.offenders import book_of
from tests.probe import foreign_vllm
from tests.probe.foreign_vllm import Request, config, install


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SOJOURN_PROBE", str(tmp_path / "probe"))
    install(monkeypatch)
    return tmp_path / "probe"


def made(**settings):
    from sojourn_probe.vllm_scheduler import scheduler_class

    return scheduler_class()(vllm_config=config(**settings))


def served(scheduler, requests, seed=0, depth=1) -> dict[str, list[tuple[str, int]]]:
    """Serves requests that come at random moments; `depth` plans are under way at once. Returns the plans."""
    draw, coming, plans, under_way = random.Random(seed), list(requests), [], []
    while coming or scheduler.requests or under_way:
        while coming and draw.random() < 0.3:
            scheduler.add_request(coming.pop(0))
        if scheduler.requests:
            plan = scheduler.schedule()
            plans.append(list(plan.num_scheduled_tokens.items()))
            scheduler.get_grammar_bitmask(plan)
            under_way.append(plan)
        if len(under_way) >= depth or not scheduler.requests:
            time.sleep(0.0003)  # the device
            if under_way:
                scheduler.update_from_output(under_way.pop(0), None)
    scheduler.shutdown()
    return plans


def some_requests(count=30, seed=1) -> list[Request]:
    draw = random.Random(seed)
    return [Request(f"cmpl-r{n}-0-{n:08x}", draw.randint(5, 150), draw.randint(1, 12)) for n in range(count)]


@pytest.mark.parametrize("blocks", [200, 16])
def test_recorded_scheduler_makes_the_plans_of_the_plain_one(folder, blocks):
    settings = {"blocks": blocks, "max_num_seqs": 6}
    recorded = served(made(**settings), some_requests())
    assert recorded == served(foreign_vllm.Scheduler(config(**settings)), some_requests())


@pytest.mark.parametrize(("blocks", "cap", "reason"), [(400, 2, "batch_cap"), (16, 8, "kv_blocks")])
def test_ledgers_close_and_waits_have_their_reason(folder, blocks, cap, reason):
    served(made(blocks=blocks, max_num_seqs=cap), some_requests())
    run = import_probe(folder)
    requests, steps = run.table("requests"), run.table("steps")
    assert len(requests) == 30 and (requests.finish_reason == "length").all()
    booked = requests[[f"ledger_{info.column}" for info in SERVER_ACCOUNTS]].sum(axis=1)
    assert (booked == requests.finished_ns - requests.arrived_ns).all()
    waited = requests[["ledger_request_queue_ns", "ledger_memory_blocked_ns", "ledger_memory_preempted_ns"]].sum(axis=1)
    assert (waited == requests.waits.map(lambda cell: sum(cell.values()))).all()
    total = sum(map(Counter, requests.waits), Counter())
    del total["step"]
    assert max(total, key=total.get) == reason
    assert (steps[[f"stage_{name}_ns" for name in STAGES]].sum(axis=1) == steps.end_ns - steps.begin_ns).all()
    assert (steps.blocks_free + steps.blocks_reusable + steps.blocks_active == blocks).all()
    sums = requests.cached_tokens + requests.computed_tokens
    assert (sums == requests.prompt_tokens + requests.output_tokens - 1).all()
    if reason == "kv_blocks":
        assert requests.preemptions.sum() > 0 and (requests.ledger_memory_recompute_ns > 0).any()
        assert all(len(row.preempted_for) == len(row.preempted_ids) for row in steps.itertuples())


@pytest.mark.parametrize("front", [None, [], [Handled("cmpl-r0-0-00000000", 1, 2, 3, 4, 5)]],
                         ids=["no front", "a front without hooks", "a front that tells of text"])  # fmt: skip
def test_text_is_seen_only_where_a_front_tells_of_it(folder, front):
    served(made(blocks=400), some_requests(5))
    if front is not None:
        written = begin("front", "vllm", "0")
        for each in front:
            written.put(each)
        written.close()
    run = import_probe(folder)
    assert (set(TEXT_ACCOUNTS) <= set(run.meta()["probe"]["unseen_accounts"])) == (not front)
    of_probe = [each for each in diagnose(run).warnings if "lies in" in each or "lie in" in each or "not seen" in each]
    assert any("token.encode lies in request.admission" in each for each in of_probe) == (front == [])
    assert not any("token.encode" in each and "work of the steps" in each for each in of_probe)


def test_a_diagnosis_of_what_was_read_before_goes(folder):
    served(made(blocks=400), some_requests(5))
    import_probe(folder).write_json("diagnosis.json", {"headline": "of five requests"})
    served(made(blocks=400), some_requests(5, seed=2))
    assert len(import_probe(folder).table("requests")) == 10 and not (folder / "diagnosis.json").exists()


def test_blame_explains_the_waits(folder):
    served(made(blocks=400, max_num_seqs=3), some_requests(60))
    run = import_probe(folder)
    book = book_of(run)
    ids = run.table("requests").set_index("request_id", drop=False).request_id
    rows, waits = matrix(book, ids), waited_ns(book)
    assert abs(rows.sum(axis=1) - waits.sum(axis=1)).max() < 1000
    assert abs(rows.unexplained.sum()) < 0.1 * waits.sum().sum()


def test_overlapping_plans_close_too(folder):
    served(made(blocks=400, overlaps=True), some_requests(), depth=2)
    run = import_probe(folder)
    requests, steps = run.table("requests"), run.table("steps")
    booked = requests[[f"ledger_{info.column}" for info in SERVER_ACCOUNTS]].sum(axis=1)
    assert (booked == requests.finished_ns - requests.arrived_ns).all()
    ends = steps.sort_values("step").device_end_ns
    assert (ends.diff().dropna() >= 0).all() and (steps.device_ns >= 0).all()
    assert (steps.device_ns.sum() + steps.gap_ns.sum()) <= steps.end_ns.max() - steps.begin_ns.min()


def test_stream_has_no_token_and_no_path(folder):
    served(made(), some_requests(5))
    content = b"".join(file.read_bytes() for file in folder.iterdir())
    assert (424242).to_bytes(4, "big") not in content and b"somebody" not in content


def test_class_of_another_version_switches_the_probe_off_with_a_sentence(tmp_path, monkeypatch, caplog):
    class Changed(foreign_vllm.Scheduler):
        def update_from_output(self, outcome):
            return super().update_from_output(outcome, None)

    monkeypatch.setenv("SOJOURN_PROBE", str(tmp_path / "probe"))
    install(monkeypatch, Changed, type("AsyncChanged", (Changed,), {}))
    scheduler = made()
    assert type(scheduler) is Changed and not (tmp_path / "probe").exists()
    assert "sojourn-probe is off" in caplog.text and "takes (outcome)" in caplog.text


def test_fault_of_the_probe_ends_the_probe_and_not_the_server(folder, monkeypatch, caplog):
    from sojourn_probe.vllm_scheduler import CoreProbe

    def fails(self, scheduler, plan, begin_ns):
        raise RuntimeError("planted")

    monkeypatch.setattr(CoreProbe, "planned", fails)
    scheduler = made(blocks=200)
    plans = served(scheduler, some_requests())
    assert plans == served(foreign_vllm.Scheduler(config(blocks=200)), some_requests())
    assert "switches itself off" in caplog.text and scheduler._probe is None


def test_nothing_is_recorded_without_a_target(folder, monkeypatch, caplog):
    monkeypatch.delenv("SOJOURN_PROBE")
    served(made(), some_requests(3))
    assert not folder.exists() and "names no folder" in caplog.text


def test_aborted_requests_end(folder):
    scheduler = made()
    scheduler.add_request(Request("cmpl-gone-0-00000000", 8, 4))
    scheduler.finish_requests(["cmpl-gone-0-00000000"], None)
    scheduler.shutdown()
    (stream,) = read_streams(folder)
    assert [each.reason for each in stream.ended] == ["abort"]
