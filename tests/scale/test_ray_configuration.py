"""`scale/ray_serve.yaml` starts a server with settings that exist. Ray's schema is asked in tests/peers."""

import shlex
from pathlib import Path

import yaml

from sojourn.engine.config import EngineConfig

FILE = Path(__file__).parents[2] / "scale" / "ray_serve.yaml"


def test_the_command_of_the_configuration_has_settings_of_serve():
    (application,) = yaml.safe_load(FILE.read_text())["applications"]
    program, verb, model, *flags = shlex.split(application["args"]["command"])
    assert (program, verb) == ("sojourn", "serve") and not {"--port", "--run-dir"} & set(flags)
    pairs = zip(flags[::2], flags[1::2], strict=True)
    settings = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    config = EngineConfig.model_validate({"model": model} | settings)
    assert set(settings) <= config.model_fields_set
    assert application["args"]["gpus"] == config.num_ranks
