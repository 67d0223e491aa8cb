"""Our own server through its metrics alone: its accounts in aggregate are those of its records."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.excess import excesses
from sojourn.diagnosis.server_means import mean_excess, shows_ledger, with_means
from sojourn.diagnosis.terminal.time_spent import render_server
from sojourn.interop.exported.prometheus import Exporter
from sojourn.interop.sources.pressure import KV_USE
from sojourn.interop.sources.view import observe, timeline
from sojourn.loadgen.target.scrape import rows_of
from sojourn.metrics.ledger import SERVER_ACCOUNTS
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment
from sojourn.metrics.steps import Steps
from tests.metrics.simulated_server import Records, S
from tests.metrics.synthetic import synthetic_run


def scraped_beside(path: Path, records: Records) -> None:
    """Renders the exporter's page once a second of the simulated time, as if it had been scraped meanwhile."""
    exporter = Exporter("simulated")
    steps = sorted(records.steps, key=lambda step: step.end_ns)
    requests = sorted(records.requests, key=lambda request: request.finished_ns)
    begin_ns = min(record.due_ns for record in records.client) - S
    end_ns = max(requests[-1].finished_ns, steps[-1].end_ns) + S
    rows = []
    for ns in [*range(begin_ns, end_ns, S), end_ns]:
        while steps and steps[0].end_ns <= ns:
            exporter.observe_steps(Steps([steps.pop(0)]))
        while requests and requests[0].finished_ns <= ns:
            exporter.observe_request(requests.pop(0))
        rows += rows_of(exporter.render(), ns, took_s=0.002)
    write_segment(path, "scrapes", rows, "0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[RunDirectory, RunDirectory]:
    """The same run with its records, and as one sees it who has only the server's metrics."""
    folder = tmp_path_factory.mktemp("runs")
    taken: list[Records] = []

    def forget(records: Records) -> None:
        scraped_beside(folder / "remote", records)
        records.requests.clear()
        records.steps.clear()

    near = synthetic_run(folder / "near", plant="tiny_kv", requests=80, keep=taken.append)
    remote = synthetic_run(folder / "remote", plant="tiny_kv", requests=80, keep=forget)
    return near, remote


def test_sums_by_account_are_those_of_the_records(runs):
    near, remote = runs
    recorded, requests = near.table("requests"), remote.requests()
    view = observe(remote, requests, requests)
    assert view.source == "sojourn" and view.finished == len(recorded) == 80
    for info, span in zip(SERVER_ACCOUNTS, view.spans, strict=True):
        assert span.accounts == [info.name]
        assert span.mean_ms == pytest.approx(recorded[f"ledger_{info.column}"].mean() / 1e6, rel=1e-9, abs=1e-9)
        assert span.ttft_ms == pytest.approx(recorded[f"ttft_{info.column}"].mean() / 1e6, rel=1e-9, abs=1e-9)
    assert view.preemptions == near.table("steps").preempted_ids.map(len).sum()


def test_remote_diagnosis_tells_the_shares_of_the_one_with_records(runs):
    near, remote = (diagnose(run) for run in runs)
    for info in SERVER_ACCOUNTS:
        assert remote.ledger_share[info.name] == pytest.approx(near.ledger_share[info.name], abs=1e-6)
        assert remote.ttft_share[info.name] == pytest.approx(near.ttft_share[info.name], abs=1e-6)
    assert remote.ledger_share["unaccounted"] == pytest.approx(
        near.ledger_share["unaccounted"] + near.ledger_share["client.network"], abs=1e-6
    )  # the one account that metrics cannot tell
    assert near.server is None and remote.server.title == "Sojourn"
    sights = {account.account: account.visibility for account in remote.server.accounts}
    of_records = {sights.pop(name) for name in ("client.network", "request.routing", "compute.stall")}
    assert of_records == {"unseen"} and set(sights.values()) == {"seen"}
    assert remote.findings[0].object == "KV block pool"


def test_report_names_what_is_unseen_once_and_the_way_to_the_records(runs):
    diagnosis = diagnose(runs[1])
    out = io.StringIO()
    Console(file=out, width=100).print(render_server(diagnosis))
    told = [line for line in out.getvalue().splitlines() if " seen " in line or " not visible " in line]
    unseen = ["client.network", "request.routing", "compute.stall"]
    assert [line.split()[0] for line in told] == ["client.lag", *unseen, "all"]
    assert any("--server-run DIR" in said for said in diagnosis.warnings)


def test_kv_use_over_time_is_that_of_the_steps_at_the_scrapes(runs):
    near, remote = runs
    steps, series = near.table("steps").sort_values("end_ns"), timeline(remote)
    for ns, used in series[KV_USE].dropna().items():
        before = steps[steps.end_ns <= ns].iloc[-1]
        pool = before.blocks_free + before.blocks_active + before.blocks_reusable
        assert used == pytest.approx(before.blocks_active / pool)


def test_sums_stand_for_the_records_of_a_diagnosis(runs):
    recorded, scraped = read_evidence(runs[0]), with_means(read_evidence(runs[1]))
    assert shows_ledger(scraped) and not shows_ledger(recorded)
    assert max(scraped.waits, key=scraped.waits.get) == max(recorded.waits, key=recorded.waits.get) == "kv_blocks"
    assert scraped.work.computed_tokens == pytest.approx(recorded.work.computed_tokens, rel=0.1)
    late = max(excesses(scraped), key=lambda excess: excess.missed)
    divided = mean_excess(scraped, late)
    assert sum(divided.accounts.values()) == pytest.approx(late.mean_ms - late.bound_ms)
    means = recorded.rows.ttft_memory_blocked_ns.mean() / recorded.rows.ttft_ms.mean() / 1e6
    assert divided.objective == "ttft_ms" and divided.share("memory.blocked") == pytest.approx(means, abs=0.01)


def test_cause_from_sums_is_the_one_from_records_with_less_confidence(runs):
    near, remote = (diagnose(run).findings[0] for run in runs)
    assert remote.key == near.key == "kv_pool" and remote.lifecycles[0] == near.lifecycles[0] == "memory"
    assert remote.confidence < near.confidence
