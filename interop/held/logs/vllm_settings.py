"""What vLLM's log says of the server itself: its version, its flags, the size of its KV cache, and its starts."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from sojourn.interop.held.given import Line
from sojourn.interop.held.held import Setting
from sojourn.interop.held.literals import lines_with
from sojourn.interop.held.logs.pairs import plain, settings_in
from sojourn.interop.held.logs.vllm_lines import RATES

VERSION = re.compile(
    r"(?:vLLM (?:API )?server version |LLM engine \(v|█ +version )(?P<version>\d+\.\d+(?:\.[\w.+\-]+)*)"
)
START = re.compile(r"Initializing an? (?:V1 )?LLM engine|vLLM (?:API )?server version|█ +version ")
FRONT = re.compile(r"vLLM (?:API )?server version |█ +version ")
ARGUMENTS = re.compile(r"(?:non-default args: (?P<dict>\{.*)|\bargs: Namespace(?P<namespace>\(.*))")
CONFIG = re.compile(r"LLM engine \(v[^)]*\) with config: (?P<config>.*)")
CONFIG_NAMES = {
    "model": "model", "dtype": "dtype", "max_seq_len": "max_model_len", "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size", "data_parallel_size": "data_parallel_size",
    "quantization": "quantization", "enforce_eager": "enforce_eager", "kv_cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching", "use_v2_block_manager": "use_v2_block_manager",
    "enable_chunked_prefill": "enable_chunked_prefill", "chunked_prefill_enabled": "enable_chunked_prefill",
    "speculative_config": "speculative_config",
}  # fmt: skip
LINES = {  # a setting → the line that states it
    "max_num_batched_tokens": re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)"),
    "port": re.compile(r"(?:Starting vLLM(?: API)? server(?: \d+)?|Uvicorn running) on https?://\S*:(\d+)"),
    "max_model_len": re.compile(r"Using max model len (\d+)"),
    "kv_cache_tokens": re.compile(r"[A-Z]+ KV cache size: ([\d,]+) tokens"),
    "num_gpu_blocks": re.compile(r"# (?:GPU|cuda|CUDA|cpu|xpu|tpu|hpu|npu) blocks: (\d+)"),
    "num_cpu_blocks": re.compile(r", # CPU blocks: (\d+)"),
    "kv_cache_gib": re.compile(r"Available KV cache memory: ([\d.]+) GiB"),
    "model_gib": re.compile(r"[Mm]odel (?:loading|weights) took ([\d.]+) (?:GiB|GB)"),
    "attention_backend": re.compile(
        r"Using (\w+(?: Attention)?) (?:attention backend\b|backend(?: on V1 engine|\.?$))"
    ),
}
CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
SOURCE_BUILD = "0.0.0"  # of a build that knows no version
SMALLEST = ("kv_cache_tokens", "num_gpu_blocks", "kv_cache_gib")  # of several workers
PRIVATE = ("host", "api_key", "ssl_keyfile", "ssl_certfile", "hf_token")


WANTED = (re.compile(re.escape(RATES)), START, VERSION, ARGUMENTS, CONFIG, CONCURRENCY, *LINES.values())


class Stated(NamedTuple):
    settings: dict[str, Setting]  # of the last start
    version: str | None
    changes: list[str]  # between two starts
    starts: list[Line]


def settings_of(lines: list[Line], text: str) -> Stated:
    """`text` holds all of the lines."""
    starts: list[Line] = []
    each_start: list[dict[str, Setting]] = [{}]
    has_served = has_engine = False
    for line in lines_with(lines, WANTED, text):
        if RATES in line.text:
            has_served = True
            continue
        if START.search(line.text):
            is_front = FRONT.search(line.text) is not None
            again = has_served or (has_engine and is_front)
            if not starts or again:
                starts.append(line)
                each_start += [{}] if again else []
            has_served, has_engine = False, (has_engine and not again) or not is_front
        each_start[-1].update(_stated(line.text, each_start[-1]))
    each_start = [each for each in each_start if each] or [{}]
    settings = dict(each_start[-1])
    version = settings.pop("version", None)
    return Stated(settings, str(version) if version else None, list(_changes(each_start)), starts)


def _changes(each_start: list[dict[str, Setting]]) -> Iterator[str]:
    """A sentence for each two starts that differ."""
    for before, now in pairwise(each_start):
        changed = [
            f"{name} {before.get(name, 'not stated')} → {now.get(name, 'not stated')}"
            for name in {**before, **now}
            if before.get(name) != now.get(name)
        ]
        if changed:
            yield ", ".join(changed)


def _stated(text: str, known: dict[str, Setting]) -> dict[str, Setting]:
    """The settings in a line, and the version."""
    if (version := VERSION.search(text)) is not None and version["version"] != SOURCE_BUILD:
        known["version"] = version["version"].rstrip(".")
    if "args" in text and (given := ARGUMENTS.search(text)) is not None:
        found = settings_in(given["dict"] or given["namespace"])
        return {name: value for name, value in found.items() if name not in PRIVATE}
    if "with config:" in text and (config := CONFIG.search(text)) is not None:
        pairs = settings_in(config["config"])
        named = {CONFIG_NAMES[name]: value for name, value in pairs.items() if name in CONFIG_NAMES}
        return named | {name: value for name, value in known.items() if name in named and name != "max_model_len"}
    found = {name: value for name in LINES if (value := _in_line(name, text, known.get(name))) is not None}
    if (match := CONCURRENCY.search(text)) is not None:
        found |= {"max_model_len": int(match[1].replace(",", "")), "max_concurrency": float(match[2])}
    return found


def _in_line(name: str, text: str, known: Setting | None) -> Setting | None:
    match = LINES[name].search(text)
    if match is None:
        return None
    value = match[1] if name == "attention_backend" else plain(match[1].replace(",", ""))
    if name in SMALLEST and isinstance(known, int | float) and isinstance(value, int | float):
        return min(value, known)
    return value
