import sys

from engine.config import EngineConfig
from engine.server.app import build_app
from tests.engine.harness import make_engine


def test_without_the_setting_no_code_of_the_injector_is_loaded(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("engine.faults")]:
        monkeypatch.delitem(sys.modules, name)
    make_engine("scenarios/tiny-model")
    build_app(EngineConfig(model="scenarios/tiny-model"))
    assert not [name for name in sys.modules if name.startswith("engine.faults")]
    make_engine("scenarios/tiny-model", faults="slow_host:ms=1")
    assert "engine.faults.core" in sys.modules and "engine.faults.front" not in sys.modules
