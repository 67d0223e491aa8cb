"""Which techniques the settings ask for. Grammars are asked for by requests."""

from collections.abc import Callable

from sojourn.engine.config import EngineConfig
from sojourn.engine.settings.tiers import has_tiers

WANTED: dict[str, Callable[[EngineConfig], bool]] = {
    "lora": lambda config: config.has_loras,
    "tiers": lambda config: has_tiers(dict(config)),
    "speculation": lambda config: config.speculation != "none",
    "group": lambda config: config.num_ranks > 1,
}
