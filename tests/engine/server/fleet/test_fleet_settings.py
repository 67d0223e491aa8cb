"""The settings of a server behind a router."""

import pytest
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint

EVENTS = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"kv_events": "127.0.0.1:5557"}, "give tcp://ADDRESS:PORT or ipc://PATH"),
    ({"kv_events": "tcp://127.0.0.1:99999"}, "give tcp://ADDRESS:PORT or ipc://PATH"),
    ({"kv_events": "inproc://x"}, "give tcp://ADDRESS:PORT or ipc://PATH"),
    ({"kv_events": EVENTS, "kv_events_replay": EVENTS}, "kv_events has the same address"),
    ({"kv_events_replay": EVENTS}, "kv_events is not set"),
    ({"kv_events_topic": "kv@"}, "kv_events is not set"),
    ({"kv_events_format": "array"}, "kv_events is not set"),
    ({"kv_events": EVENTS, "kv_events_buffer": 5}, "kv_events_replay is not set"),
    ({"kv_events": EVENTS, "prefix_caching": False}, "switch prefix_caching on"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(settings, sentence):
    with pytest.raises(ValidationError) as refused:
        EngineConfig(model="m", **settings)
    assert sentence in complaint(refused.value)


def test_settings_that_fit_are_taken():
    for endpoint in (EVENTS, "tcp://*:5557", "tcp://[::1]:0", "ipc:///run/events"):
        assert EngineConfig(model="m", kv_events=endpoint, kv_events_replay="tcp://127.0.0.1:0").kv_events == endpoint
