"""The new name of a family that a server has renamed, or the name that another server gives the same."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from sojourn.interop.queries.exported import PARTS, Exported
from sojourn.interop.sources.names import canonical
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.source import Source, Sum

CLOSE = 0.95  # of 1, by difflib: a slip of one or two characters; below it a name is another name
# Families without a successor of one name. Source: vLLM's documentation of metrics, versions 0.6 to 0.11.
REPLACED = {
    "vllm:gpu_prefix_cache_hit_rate":
        "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])",
    "vllm:avg_prompt_throughput_toks_per_s": "rate(vllm:prompt_tokens_total[5m])",
    "vllm:avg_generation_throughput_toks_per_s": "rate(vllm:generation_tokens_total[5m])",
    "vllm:time_in_queue_requests": "vllm:request_queue_time_seconds",
    "vllm:model_forward_time_milliseconds": "vllm:request_prefill_time_seconds or vllm:request_decode_time_seconds",
    "vllm:model_execute_time_milliseconds": "vllm:request_inference_time_seconds",
    "vllm:spec_decode_draft_acceptance_rate":
        "rate(vllm:spec_decode_num_accepted_tokens_total[5m]) / rate(vllm:spec_decode_num_draft_tokens_total[5m])",
}  # fmt: skip
GONE = {
    "vllm:num_requests_swapped": "engine V1 swaps no request out, and preempted ones wait in num_requests_waiting",
    "vllm:cpu_cache_usage_perc": "engine V1 has no pool of swapped blocks",
    "vllm:cpu_prefix_cache_hit_rate": "engine V1 has no prefix cache of swapped blocks",
}


@dataclass(frozen=True, slots=True)
class Successor:
    name: str  # on the page
    why: str


def successor(asked: str, exported: Exported) -> Successor | None:
    """The name on the page that holds what `asked` held; None where none is known."""
    base, part = split(asked)
    known = canonical(base)
    on_page = {canonical(name): name for name in (*exported.types, *exported.samples)}
    if known in GONE:
        return None
    if known in REPLACED and any(name in REPLACED[known] for name in on_page):
        return Successor(REPLACED[known], "vLLM has replaced it")
    for whole, rest in ((canonical(asked), ""), (known, part)):  # a source may translate a histogram or its count
        for name, why in _equals(whole):
            if (found := on_page.get(f"{name}{rest}")) is not None:
                return Successor(found, why)
    if (found := on_page.get(canonical(asked))) is not None:
        return Successor(found, "the name as this page writes it")
    for ending in ("_total", "_bucket", "_seconds", "_seconds_bucket"):
        if f"{asked}{ending}" in exported.samples:
            return Successor(f"{asked}{ending}", "the same name, with its ending")
    near = difflib.get_close_matches(asked, list(exported.samples), n=1, cutoff=CLOSE)
    return Successor(near[0], "a slip of the pen? It is the nearest name") if near else None


def gone(asked: str) -> str:
    """What is known of a family that has no successor on the page."""
    return f"leave it out: {GONE.get(canonical(split(asked)[0]), 'no successor is known')}"


def split(asked: str) -> tuple[str, str]:
    """A sample's name as family and part: `x_bucket` → `x`, `_bucket`."""
    part = next((part for part in PARTS if asked.endswith(part)), "")
    return asked.removesuffix(part), part


def _equals(known: str) -> Iterator[tuple[str, str]]:
    """The other names of the same figure: those of the server's other versions, then those of other servers."""
    of_others: list[tuple[str, str]] = []
    for source in SOURCES:
        for item in source.translations:
            for terms in item.theirs:
                if (at := _place(known, terms)) is None:
                    continue
                for other, versions in zip(item.theirs, item.versions or ("",) * len(item.theirs), strict=False):
                    if other != terms and len(other) == len(terms) and other[at].sign == terms[at].sign:
                        yield other[at].name, f"{source.title} has renamed it{f' ({versions})' if versions else ''}"
                if len(terms) == 1 and not item.labels:
                    of_others += _of_other_servers(source, item.ours)
    yield from of_others


def _place(known: str, terms: Sum) -> int | None:
    return next((at for at, term in enumerate(terms) if term.name == known), None)


def _of_other_servers(source: Source, ours: str) -> Iterator[tuple[str, str]]:
    for other in SOURCES:
        for item in other.translations if other is not source else ():
            if item.ours == ours and not item.labels:
                for terms in item.theirs:
                    if len(terms) == 1 and not terms[0].where:
                        yield terms[0].name, f"{other.title}'s name of the same figure"
