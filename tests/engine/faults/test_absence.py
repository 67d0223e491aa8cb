import sys

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.app import build_app
from tests.engine.harness import make_engine


def test_without_the_setting_no_code_of_the_injector_is_loaded(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("sojourn.engine.faults")]:
        monkeypatch.delitem(sys.modules, name)
    make_engine("scenarios/tiny-model")
    build_app(EngineConfig(model="scenarios/tiny-model"))
    assert not [name for name in sys.modules if name.startswith("sojourn.engine.faults")]
    make_engine("scenarios/tiny-model", faults="slow_host:ms=1")
    assert "sojourn.engine.faults.core" in sys.modules and "sojourn.engine.faults.front" not in sys.modules
