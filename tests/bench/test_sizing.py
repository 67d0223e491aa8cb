"""The page of the articles' figures says what the articles do, by the functions of `size`."""

import pytest

pytest.importorskip("aiconfigurator_core")

from bench.sizing import articles
from bench.sizing.agreement import read_agreement


def test_a_70b_model_at_fp16_reads_140_gb_in_42_ms(monkeypatch):
    monkeypatch.setattr(articles, "_kernels", lambda *_: "–")
    text = "\n".join(articles._one_token())
    assert "| 140 GB | 41.8 | 23.9 |" in text and "| 139.0 GB | 41.5 | 24.1 |" in text


def test_recorded_servers_agree():
    """TPOT within 10 %, capacity within 1.25 times: of the figures that the page shows."""
    found = read_agreement()
    assert any(each.server.startswith("vllm") for each in found)
    for each in found:
        assert abs(each.tpot_error) < 0.1 and 0.8 < each.capacity_ratio < 1.25, each
