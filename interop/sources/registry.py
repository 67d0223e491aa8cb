"""The servers whose /metrics is understood."""

from collections.abc import Set as AbstractSet

from sojourn.interop.sources.courses import gauges_followed
from sojourn.interop.sources.dynamo import DYNAMO
from sojourn.interop.sources.litellm import LITELLM
from sojourn.interop.sources.llama_cpp import LLAMA_CPP
from sojourn.interop.sources.lmdeploy import LMDEPLOY
from sojourn.interop.sources.sglang import SGLANG
from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.tensorrt_llm import TENSORRT_LLM
from sojourn.interop.sources.tgi import TGI
from sojourn.interop.sources.translate import names_of, names_that_grow
from sojourn.interop.sources.triton import TRITON
from sojourn.interop.sources.vllm import VLLM

# Ours first: a page of ours may have vLLM's names beside its own, which say more. A front comes last: a worker's page
# may have some of its names. Triton may show those of the backend behind it.
SOURCES: tuple[Source, ...] = (SOJOURN, VLLM, SGLANG, LLAMA_CPP, LMDEPLOY, TENSORRT_LLM, TGI, TRITON, DYNAMO, LITELLM)
TITLES = " or ".join([", ".join(source.title for source in SOURCES[:-1]), SOURCES[-1].title])

KNOWN = frozenset(
    name
    for source in SOURCES
    for name in (
        *names_that_grow(source),
        *names_of(source, "gauge"),
        *source.steps,
        *gauges_followed(source),
        *(each.gauge for each in source.setting_gauges.values()),
    )
)


def recognise(names: AbstractSet[str]) -> Source | None:
    """The source of a page with samples of these names; None for a server that is not known here."""
    return next((source for source in SOURCES if any(name.startswith(source.prefix) for name in names)), None)
