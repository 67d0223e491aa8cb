"""What the settings of a parallel group mean for one rank."""

from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.config import EngineConfig
from sojourn.engine.process import num_cores


def layout_of(config: EngineConfig, rank: int) -> ParallelLayout:
    """Raises ModelError for sizes that do not go together."""
    sizes = config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
    return ParallelLayout(*sizes, rank, divides_tokens=config.expert_exchange == "all-to-all")


def threads_of(config: EngineConfig) -> int:
    """CPU threads of one rank: the ranks of a host share its cores."""
    return config.threads or max(1, num_cores() // config.num_ranks)


def timeout_seconds(config: EngineConfig) -> float:
    """How long an exchange between ranks may wait. The front replaces a core that is silent for less."""
    return 2 * config.core_hung_seconds
