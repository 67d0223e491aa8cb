"""The flags of `vllm bench serve` as a scenario: contradictions are refused, defaults are vLLM's."""

import argparse
import json
import math
import re
from typing import Any

from pydantic import ValidationError

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.faults import describe_faults
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.metrics.errors import InputError
from sojourn.metrics.request.objectives import STANDS_IN

NO_OBJECTIVE = f"MLPerf Inference, Llama 3.1 8B, server scenario: {STANDS_IN}"
SLO_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2e_ms"}
BACKENDS = {"openai": "completions", "vllm": "completions", "openai-chat": "chat"}
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "burstgpt", "timed_trace")
FLAGS_OF_KEYS = {
    "arrivals.count": "num_prompts", "arrivals.rate_rps": "request_rate", "arrivals.in_flight": "max_concurrency",
    "arrivals.file": "dataset_path", "workload.classes[0].from_file": "dataset_path",
    "workload.classes[0].num_shared_prefixes": "prefix_repetition_num_prefixes", "measure.seed": "seed",
    "arrivals.seconds_per_unit": "timed_trace_sec_multiplier", "arrivals.hash_tokens": "timed_trace_chunk_hash_size",
    "measure.warmup_requests": "num_warmups", "target.tokenizer": "tokenizer",
}  # fmt: skip
LONGEST_TOKENS = 10_000_000


def scenario_of(options: argparse.Namespace, stated: set[str]) -> Scenario:
    """Converts parsed flags, None for absent ones; `stated` are the given ones. Raises FlagError, ScenarioError."""
    _refuse_foreign(options.dataset_name, stated)
    api = _api(options)
    document = {
        "name": f"bench-serve-{options.dataset_name}",
        "description": "Made of the flags of `vllm bench serve`, as they were given to `sojourn bench-serve`.",
        # vLLM asks for the usage of the whole answer: some servers refuse any other key of stream_options.
        "target": {"api": api, "usage": "final", "headers": _headers(options), "verify_tls": not options.insecure}
        | ({"tokenizer": options.tokenizer} if options.tokenizer else {}),
        "arrivals": _arrivals(options),
        "workload": {"classes": [{"klass": "all-requests"} | _sampling(options) | _requests(options)]},
        "objectives": [_objective(options)],
        "measure": {"seed": options.seed or 0, "warmup_requests": options.num_warmups or 0},
    }
    try:
        return Scenario(**document)
    except ValidationError as error:
        raise ScenarioError(*[_in_flags(fault, options) for fault in describe_faults(error, Scenario)]) from None


def _in_flags(fault: str, options: argparse.Namespace) -> str:
    """A fault of the scenario, in terms of its flag: the user typed no keys of a scenario."""
    data = options.dataset_name
    flags = FLAGS_OF_KEYS | {
        "workload.classes[0].prompt_tokens": "input_len" if options.input_len is not None else f"{data}_input_len",
        "workload.classes[0].output_tokens": "output_len" if options.output_len is not None else f"{data}_output_len",
        "workload.classes[0].shared_prefix_tokens": f"{data}_prefix_len",
    }

    def named(key: re.Match) -> str:
        path = max((path for path in flags if f"{key[1]}.".startswith(f"{path}.")), key=len, default=None)
        name = flags[path] if path else key[1].rpartition(".")[2] if key[1].startswith("workload.") else None
        return flag(name) if name in vars(options) else f"of these flags: {key[0]}"

    return re.sub(r"`([\w.\[\]]+)`", named, fault, count=1)


def _refuse_foreign(dataset: str, stated: set[str]) -> None:
    """Refuses flags of another data set."""
    owners = {"random_": "random", "input_": "random", "prefix_repetition_": "prefix_repetition",
              "sharegpt_": "sharegpt", "custom_": "custom", "timed_trace_": "timed_trace",
              "self_timed": "timed_trace"}  # fmt: skip
    for name in sorted(stated):
        for prefix, owner in owners.items():
            if name.startswith(prefix) and dataset != owner:
                raise InputError(
                    f"{flag(name)} is of --dataset-name {owner}, but it is {dataset}; leave one of them out"
                )
    synthetic = dataset in ("random", "prefix_repetition")
    if synthetic and "dataset_path" in stated:
        raise InputError(f"--dataset-name {dataset} reads no file; leave --dataset-path out")
    if not synthetic and "dataset_path" not in stated:
        raise InputError(f"--dataset-name {dataset} needs its file; add --dataset-path")
    for general, own in (("input_len", "random_input_len"), ("output_len", f"{dataset}_output_len")):
        if general in stated and own in stated:
            raise InputError(f"{flag(general)} and {flag(own)} say the same; keep one of the two")


def _api(options: argparse.Namespace) -> str:
    by_endpoint = {path: api for api, path in ENDPOINTS.items()}.get(options.endpoint)
    by_backend = BACKENDS.get(options.backend)
    if by_backend and by_endpoint and by_backend != by_endpoint:
        raise InputError(
            f"--backend {options.backend} asks {ENDPOINTS[by_backend]}, but --endpoint is {options.endpoint}; keep one"
        )
    return by_backend or by_endpoint or "completions"


def _arrivals(options: argparse.Namespace) -> dict[str, Any]:
    count = {"count": 1000 if options.num_prompts is None else options.num_prompts}
    return count | (_trace(options) if options.dataset_name == "timed_trace" else _pace(options))


def _trace(options: argparse.Namespace) -> dict[str, Any]:
    if any(given is not None for given in (options.request_rate, options.burstiness, options.max_concurrency)):
        raise InputError(
            "timed_trace brings its own times, so --request-rate, --burstiness and --max-concurrency say nothing; "
            "leave them out"
        )
    given = {"seconds_per_unit": options.timed_trace_sec_multiplier,
             "hash_tokens": options.timed_trace_chunk_hash_size}  # fmt: skip
    return {"process": "trace", "file": options.dataset_path, "duration_s": 604_800} | {
        name: value for name, value in given.items() if value is not None
    }


def _pace(options: argparse.Namespace) -> dict[str, Any]:
    rate, burstiness = options.request_rate, options.burstiness
    unbounded = rate is None or math.isinf(rate)
    if rate is not None and not rate > 0:
        raise InputError(f"--request-rate is {rate:g}; it must be above 0, or inf for all at once")
    if burstiness is not None and not burstiness > 0:
        raise InputError(f"--burstiness is {burstiness:g}; it must be above 0, or inf for equal gaps")
    if unbounded and burstiness is not None and burstiness != 1:
        raise InputError(
            f"--burstiness is {burstiness:g}, but without a --request-rate all requests come at once, without gaps; "
            "add --request-rate, or leave it out"
        )
    if options.max_concurrency is not None:
        if not unbounded:
            raise InputError(
                f"--request-rate {rate:g} says when requests come, --max-concurrency {options.max_concurrency} that "
                "they wait in the client instead: such a run hides the server's delay. Keep one of the two"
            )
        return {"process": "concurrency", "in_flight": options.max_concurrency}
    if unbounded:
        return {"process": "at_once"}
    if burstiness is None or burstiness == 1:
        return {"process": "poisson", "rate_rps": rate}
    if math.isinf(burstiness):
        return {"process": "constant", "rate_rps": rate}
    return {"process": "gamma", "rate_rps": rate, "cv": 1 / math.sqrt(burstiness)}


def _requests(options: argparse.Namespace) -> dict[str, Any]:
    """Lengths and content of the one class."""
    ignore_eos = {"ignore_eos": bool(options.ignore_eos) or options.dataset_name in ("random", "timed_trace")}
    if options.dataset_name == "random":
        return _random(options) | ignore_eos
    if options.dataset_name == "prefix_repetition":
        prefix, suffix = _or(options.prefix_repetition_prefix_len, 256), _or(options.prefix_repetition_suffix_len, 256)
        return ignore_eos | {
            "prompt_tokens": prefix + suffix, "shared_prefix_tokens": prefix, "content": "random",
            "num_shared_prefixes": _or(options.prefix_repetition_num_prefixes, 10),
            "output_tokens": _or(options.output_len, _or(options.prefix_repetition_output_len, 128)),
        }  # fmt: skip
    from_file = {"distribution": "trace", "min_tokens": 1, "max_tokens": LONGEST_TOKENS}
    source = {} if options.dataset_name == "timed_trace" else {"from_file": options.dataset_path}
    contents = {"sharegpt": "recorded", "custom": "recorded", "timed_trace": "blocks"}
    content = contents.get(options.dataset_name, "random")
    by_dataset = {"sharegpt": options.sharegpt_output_len, "custom": _or(options.custom_output_len, 256)}
    output = _or(options.output_len, by_dataset.get(options.dataset_name))
    answer = from_file if output is None or output == -1 else output
    return source | ignore_eos | {"content": content, "prompt_tokens": from_file, "output_tokens": answer}


def _random(options: argparse.Namespace) -> dict[str, Any]:
    prompt = _or(options.input_len, _or(options.random_input_len, 1024))
    output = _or(options.output_len, _or(options.random_output_len, 128))
    prefix, (of_prompt, of_output) = options.random_prefix_len or 0, _ratios(options.random_range_ratio or "0")
    low, high = math.floor(prompt * (1 - of_prompt)), math.ceil(prompt * (1 + of_prompt))
    length: Any = prefix + prompt
    if of_prompt:
        length = {"distribution": "uniform", "min_tokens": prefix + low, "max_tokens": prefix + high}
    answer: Any = {"distribution": "around", "tokens": output, "ratio": of_output} if of_output else output
    shared = {"shared_prefix_tokens": prefix} if prefix else {}
    return {"prompt_tokens": length, "output_tokens": answer, "content": "random"} | shared


def _ratios(text: str) -> tuple[float, float]:
    try:
        value = json.loads(text)
        pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        ratios = float(pair[0]), float(pair[1])
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f'--random-range-ratio is {text!r}; it takes a number, or JSON such as \'{{"input": 0.3, "output": 0.5}}\''
        ) from None
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise InputError(f"--random-range-ratio is {text}; it must be at least 0 and below 1")
    return ratios


def _headers(options: argparse.Namespace) -> dict[str, str]:
    return dict(pair(each, "=", "--header") for each in options.header or ())


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
             "extra_body")  # fmt: skip
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if chosen.get("top_k") in (-1, 0):  # vLLM's words for no top-k
        del chosen["top_k"]
    return chosen


def _objective(options: argparse.Namespace) -> dict[str, Any]:
    if not options.goodput:
        return {"klass": "all", "ttft_ms": 2000.0, "tpot_ms": 100.0, "source": NO_OBJECTIVE}
    bounds: dict[str, Any] = {}
    for each in options.goodput:
        name, value = pair(each, ":", "--goodput")
        if name not in SLO_NAMES:
            raise InputError(f"--goodput has {name!r}; it takes {', '.join(SLO_NAMES)}, such as ttft:500")
        if not re.fullmatch(r"\d+(\.\d+)?", value) or not float(value) > 0:
            raise InputError(f"--goodput has {each!r}; the bound is a number of milliseconds above 0, such as ttft:500")
        if SLO_NAMES[name] in bounds:
            raise InputError(f"--goodput has {name} twice; keep one")
        bounds[SLO_NAMES[name]] = float(value)
    return {"klass": "all", **bounds, "source": f"--goodput {' '.join(options.goodput)}"}


def pair(text: str, mark: str, flag: str) -> tuple[str, str]:
    """`ttft:500` → ("ttft", "500")."""
    name, found, value = text.partition(mark)
    if not found or not name:
        raise InputError(f"{flag} has {text!r}; it takes NAME{mark}VALUE")
    return name.strip(), value.strip()


def _or(value: int | None, otherwise: Any) -> Any:
    return otherwise if value is None else value


def flag(name: str) -> str:
    """`output_len` → `--output-len`."""
    return f"--{name.replace('_', '-')}"
