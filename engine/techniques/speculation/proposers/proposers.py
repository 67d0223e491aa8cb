"""Makes the proposer that the settings ask for."""

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.kv_cache import KVCache
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.config import EngineConfig
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.techniques.speculation.proposers.drafters import outlined_drafter
from sojourn.engine.techniques.speculation.proposers.early_exit import EarlyExitProposer
from sojourn.engine.techniques.speculation.proposers.ngram import NgramProposer
from sojourn.engine.techniques.speculation.proposers.proposer import Proposer

LONGEST_MATCH = 4


def make_proposer(
    config: EngineConfig, target: PlacedModel, kv_cache: KVCache, attention: AttentionBackend, operations: Operations
) -> Proposer:
    """For a loaded target with its KV cache and its kernels. Raises ModelError where the model cannot have it."""
    if config.speculation == "ngram":
        return NgramProposer(config.speculation_ngram or LONGEST_MATCH)
    if config.speculation == "early-exit":
        return EarlyExitProposer(
            target.model, config.speculation_layers, kv_cache, config.block_size, attention, operations
        )
    drafter = outlined_drafter(config, target)
    assert drafter is not None, "each other setting names weights"
    return drafter.load(target, kv_cache.values.shape[2], config.block_size)
