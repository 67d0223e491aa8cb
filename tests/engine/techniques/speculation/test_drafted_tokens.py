"""Drafters with weights change no token either: the claims of test_speculation.py, for each of them."""

import pytest

from tests.engine.request.test_metamorphic import tokens_of, traffic
from tests.engine.techniques.speculation.test_speculation import requests_with_controls, told
from tests.further import further


@pytest.mark.parametrize(
    ("proposer", "folder", "overlap"),
    [("draft-model", "tiny-draft", "off"), ("medusa", "tiny-medusa", "on"), ("eagle3", "tiny-eagle3", "off"),
     *further(("draft-model", "tiny-draft", "on"), ("eagle3", "tiny-eagle3", "on"))],
)  # fmt: skip
def test_every_control_gives_the_same_tokens_with_drafts(proposer, folder, overlap):
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "overlap": overlap}
    settings = {"speculation": proposer, "speculation_model": folder, "speculation_adaptive": "off"}
    plain, _ = told("tiny-model", requests_with_controls(), **limits)
    drafted, records = told("tiny-model", requests_with_controls(), **settings, **limits)
    assert drafted == plain
    assert sum(record.accepted_tokens for record in records) > 10


@pytest.mark.parametrize(
    "limits",
    [
        {"num_kv_blocks": 10, "max_model_len": 150},
        *further(
            {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_prefill_chunk_tokens": 7, "block_size": 5},
            {"attention_backend": "torch", "fused_operations": "off", "overlap": "on", "prefix_caching": False},
        ),
    ],
    ids=lambda limits: " ".join(limits),
)
@pytest.mark.parametrize(
    "name", ["draft model", "medusa", "eagle3", "mtp", *further("medusa of vllm", "eagle3 of its authors")]
)
def test_speculation_changes_no_token_of_the_real_engine_and_loses_no_nanosecond(name, limits, drafter):
    """Greedy and seeded requests, forks, prefix hits and preemptions."""
    proposer = drafter(name)
    folder = proposer.pop("model")
    plain, _ = tokens_of(folder, traffic(), together=4, **limits)
    drafted, preemptions = tokens_of(
        folder, traffic(), together=4, speculation_adaptive="off", speculation_tokens=5, **proposer, **limits
    )
    assert drafted == plain
    assert preemptions > 0 or "num_kv_blocks" not in limits
