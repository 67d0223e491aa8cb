"""`serve --check` finds what would keep the server from starting."""

import re

import pytest

from engine.check import check
from engine.config import EngineConfig
from metrics.errors import SojournError

FAULTS = {
    "access": ("tiers: {}", "default_tier is missing"),
    "api_keys": ("- {id: x}", "0.id is not valid"),
    "moderation": ("profiles: {a: {input: [{check: none}]}}\nchecks: {}", "names the check 'none'"),
    "usage_prices": ("models: {}", "is not one"),
    "usage_dir": ("a file", "choose another with --usage-dir"),
    "run_dir": ("a file", "choose another with --run-dir"),
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
