"""The settings of prefill and decode servers are honoured, or refused with a sentence."""

import pytest
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint
from sojourn.engine.settings.handover import may_read_from


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_lease_seconds": 5}, "set kv_role"),
        ({"kv_transport": "nixl"}, "set kv_role"),
        ({"kv_role": "prefill", "prefix_caching": False}, "switch prefix_caching on"),
        ({"kv_role": "decode", "tensor_parallel": 2}, "leave kv_role out"),
        ({"kv_role": "decode", "kv_peers": "http://a:1"}, "is no host"),
        ({"kv_role": "prefill", "kv_transfer_host": "a b"}, "without scheme and port"),
        ({"kv_role": "prefill", "kv_lease_seconds": 0.1}, "greater than or equal to 0.5"),
        ({"kv_role": "prefil"}, "'prefill', 'decode' or 'both'"),
    ],
)
def test_what_does_not_fit_is_refused(settings, words):
    with pytest.raises(ValidationError) as refused:
        EngineConfig(model="tiny-model", **settings)
    assert words in complaint(refused.value)


def test_a_decode_server_reads_from_loopback_or_from_listed_hosts():
    assert all(may_read_from(None, host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(may_read_from(None, host) for host in ("10.0.0.1", "evil", "127.0.0.1.evil", ""))
    assert may_read_from("10.0.0.1, prefill-1", "prefill-1") and not may_read_from("10.0.0.1", "127.0.0.1")
