"""Waits for another server, or for a model: the account that holds the time names its cause."""

import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.explanation import explanation_of
from tests.metrics.sampled_machine import with_requests
from tests.metrics.synthetic import synthetic_run

PARTS = ("ledger", "ttft")


@pytest.mark.parametrize(
    ("account", "key", "words"),
    [
        ("request_remote_prefill", "slow_prefill_server", "until a prefill server had computed their prompts"),
        ("memory_transfer", "slow_kv_transfer", "for KV that a prefill server had computed"),
        ("request_cold_start", "cold_model", "requests wait until their model is loaded or woken"),
    ],
)
def test_the_account_that_holds_the_time_names_the_cause(tmp_path, account, key, words):
    run = synthetic_run(tmp_path / "run", plant="slow_encode", requests=60)
    moved = {f"{part}_{account}_ns": (lambda rows, part=part: rows[f"{part}_token_encode_ns"]) for part in PARTS}
    emptied = {f"{part}_token_encode_ns": lambda rows: 0 for part in PARTS}
    read = {"transfer_bytes": lambda rows: 10_000_000, "transfer_ns": lambda rows: 5_000_000}
    run = with_requests(run, **moved, **emptied, **read)
    found = diagnose(run).findings[0]
    request = run.table("requests").request_id[0]
    assert next(iter(explanation_of(run, request).waits_ns)) == account.replace("_", ".", 1), "it waited for that"
    assert found.key == key and words in found.cause
    rates = [each.statement for each in found.evidence if "GB/s" in each.statement]
    assert rates == (["600 MB of KV were read at 2 GB/s"] if key == "slow_kv_transfer" else [])
