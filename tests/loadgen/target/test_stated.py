"""What a load knows of the settings of a server that others started, and what a comparison lists of them."""

import pytest

from sojourn.loadgen.run.experiment import load_url
from sojourn.metrics.compare.comparable import what_differs
from sojourn.metrics.compare.settings import alike, states_settings
from sojourn.metrics.errors import ReplayError
from sojourn.replay.settings import recorded_config
from tests.loadgen.scenarios import CHAT, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.server

PAGE = (
    '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{block_size="{size}",cache_dtype="auto",engine="0",'
    'enable_prefix_caching="{caching}",num_gpu_blocks="{blocks}",num_cpu_blocks="None"}} 1.0\n'
    '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{model_name="scripted"}} 0.0\n'
)
CARD = {"root": "/models/a", "max_model_len": 2048, "created": 1, "permission": [{"id": "modelperm-1"}]}


def meta_of(folder, script: Script) -> dict:
    chosen = scenario({"process": "constant", "rate_rps": 50, "count": 3}, [CHAT])
    return load_url(chosen, ScriptedServer(script).start().url, folder).meta()


def test_what_a_server_says_of_itself_is_listed_where_it_differs(tmp_path):
    page = PAGE.format(size=16, caching=True, blocks=512).encode()
    before = meta_of(tmp_path / "a", Script(card=CARD, version="0.31.0", page=page))
    page = PAGE.format(size=16, caching=False, blocks=20).encode()
    card = CARD | {"max_model_len": 4096, "created": 2, "permission": [{"id": "modelperm-2"}]}
    after = meta_of(tmp_path / "b", Script(card=card, version="0.32.0", page=page))
    (line,) = what_differs(before, after)
    for said in (
        "engine.prefix_caching is true in A and false in B", "engine.num_kv_blocks is 512 in A and 20 in B",
        "engine.max_model_len is 2048 in A and 4096 in B",
        'server.vllm is "0.31.0" in A and "0.32.0" in B',
    ):  # fmt: skip
        assert said in line
    assert line.count(" in A and ") == 4, line
    assert what_differs(before, before) == []
    assert not states_settings(before) and "settings are not known" in alike(before, before)
    with pytest.raises(ReplayError):  # a page says too little for a replay
        recorded_config(before)


def test_a_server_that_says_nothing_leaves_a_run_all_the_same(tmp_path):
    meta = meta_of(tmp_path / "a", Script(metrics=False))
    assert "server_settings" not in meta and "server_versions" not in meta and what_differs(meta, meta) == []
