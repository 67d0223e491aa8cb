"""Runs of which a replay would tell something else than what happened."""

from types import SimpleNamespace

import pandas as pd
import pytest

from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import ReplayError
from sojourn.replay.material import material_of


def test_a_run_whose_prompts_another_server_computed_is_refused():
    requests = pd.DataFrame({"arrived_ns": [1], "sent_ns": [0]})
    meta = {"engine": {"served": {"engine": {"kv_role": "decode"}}}}
    config = EngineConfig(model="tiny-model")
    with pytest.raises(ReplayError, match="kv_role=decode"):
        material_of(SimpleNamespace(name="run"), meta, requests, pd.DataFrame({"begin_ns": []}), config)
