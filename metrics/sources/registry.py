"""The servers whose /metrics is understood."""

from collections.abc import Set as AbstractSet

from metrics.sources.sglang import SGLang
from metrics.sources.sojourn import Sojourn
from metrics.sources.source import Source
from metrics.sources.vllm import VLLM

# Ours first: with vLLM's names beside its own it would be recognised as both, and its own names tell more.
SOURCES: tuple[Source, ...] = (Sojourn(), VLLM(), SGLang())
SOURCE_BY_KEY = {source.key: source for source in SOURCES}


def recognise(names: AbstractSet[str]) -> Source | None:
    """The source of a page with samples of these names; None for a server that is not known here."""
    return next((source for source in SOURCES if source.recognises(names)), None)
