"""What the settings of a parallel group mean for one rank."""

from engine.compute.communication.layout import ParallelLayout
from engine.config import EngineConfig
from engine.process import num_cores


def layout_of(config: EngineConfig, rank: int) -> ParallelLayout:
    """Raises ModelError for sizes that do not go together."""
    return ParallelLayout(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, rank)


def threads_of(config: EngineConfig) -> int:
    """CPU threads of one rank: the ranks of a host share its cores."""
    return config.threads or max(1, num_cores() // config.num_ranks)


def timeout_seconds(config: EngineConfig) -> float:
    """How long an exchange between ranks may wait. The front replaces a core that is silent for less."""
    return 2 * config.core_hung_seconds
