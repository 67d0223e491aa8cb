"""Makes the proposer that the settings ask for."""

from engine.config import EngineConfig
from engine.token.speculation.ngram import NgramProposer
from engine.token.speculation.proposer import Proposer

LONGEST_MATCH = 4


def make_proposer(config: EngineConfig) -> Proposer:
    """Raises ModelError where the model cannot have it."""
    return NgramProposer(config.speculation_ngram or LONGEST_MATCH)
