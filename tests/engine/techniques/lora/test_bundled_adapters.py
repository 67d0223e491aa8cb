"""The adapters that come with the bundled model."""

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.techniques.lora.checkpoint.checkpoint import describe

NAMES = ("files", "numbers", "network", "tests")


@pytest.mark.parametrize("name", NAMES)
def test_a_bundled_adapter_is_found_by_its_name_and_is_tiny(name):
    (folder,) = EngineConfig(model="tiny-model", lora_adapters=[f"{name}=tiny-adapters/{name}"]).lora_adapters.values()
    found = describe(folder)
    assert found.base_model == "tiny-model" and found.nbytes < 50_000
    assert {module.rank for module in found.modules} == {2}


def test_a_folder_of_that_name_goes_before_the_bundled_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-adapters" / "files").mkdir(parents=True)
    (folder,) = EngineConfig(model="tiny-model", lora_adapters=["files=tiny-adapters/files"]).lora_adapters.values()
    assert not folder.is_absolute()
