"""`serve --check` finds what would keep the server from starting."""

import re
import shutil
import socket

import pytest

from sojourn.engine.check import check
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.metrics.errors import SojournError

FAULTS = {
    "access": ("tiers: {}", "default_tier is missing"),
    "api_keys": ("- {id: x}", "0.id is not valid"),
    "moderation": ("profiles: {a: {input: [{check: none}]}}\nchecks: {}", "names the check 'none'"),
    "usage_prices": ("models: {}", "is not one"),
    "usage_dir": ("a file", "choose another with --usage-dir"),
    "run_dir": ("a file", "choose another with --run-dir"),
    "kv_disk_path": ("a file", "choose another with --kv-disk-path"),
}


@pytest.mark.parametrize("setting", FAULTS)
def test_a_file_that_the_server_could_not_use_is_named(tmp_path, setting):
    content, sentence = FAULTS[setting]
    file = tmp_path / "file"
    file.write_text(content)
    others = {"usage_dir": tmp_path / "usage"} if setting == "usage_prices" else {}
    config = EngineConfig(model="tiny-model", port=0, **{setting: file}, **others)
    with pytest.raises(SojournError, match=re.escape(sentence)):
        check(config)
    assert not (tmp_path / "usage").exists(), "nothing is written"


def test_a_disk_tier_that_its_disk_has_no_room_for_is_refused(tmp_path):
    with pytest.raises(SojournError, match=r"has room for .*, and kv_disk_gib=1e\+06; lower it"):
        check(EngineConfig(model="tiny-model", port=0, kv_disk_path=tmp_path / "new", kv_disk_gib=1e6))
    check(EngineConfig(model="tiny-model", port=0, kv_disk_path=tmp_path / "new", kv_disk_gib=1e-3))
    assert not (tmp_path / "new").exists(), "nothing is written"


def test_a_remote_tier_must_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"lm://127.0.0.1:{listener.getsockname()[1]}"
        check(EngineConfig(model="tiny-model", port=0, kv_remote_url=url))
    with pytest.raises(SojournError, match=f"no server answers at {url}: Connection refused"):
        check(EngineConfig(model="tiny-model", port=0, kv_remote_url=url))


def test_sampling_that_no_request_may_have_is_refused_unless_it_is_ignored(tmp_path):
    folder = shutil.copytree(model_folder("tiny-model"), tmp_path / "own")
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(SojournError, match=r"generation_config\.json has top_p=7; it must be a number from 0 to 1"):
        check(EngineConfig(model=str(folder), port=0))
    check(EngineConfig(model=str(folder), port=0, generation_config="none"))
