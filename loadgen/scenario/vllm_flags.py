"""The flags of `vllm bench serve` 0.33 → a scenario.

A flag means the same as there, or is refused with a sentence: none is accepted and ignored. Differences: gaps are drawn
absolutely and not rescaled to the mean, and lengths are exact with `--tokenizer` (else in words).
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sojourn.interop.exported.vllm_result import COLUMNS
from sojourn.loadgen.errors import nearest
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.scenario.vllm_scenario import BACKENDS, DATASETS, ENDPOINTS, flag, pair, scenario_of
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import epilog

MOST_PROCESSES = 64
# Flags of vLLM without a counterpart, with the way out of each.
REFUSED = {
    "--ramp-up-strategy": "vLLM ramps over the number of requests; write a scenario with a ramp over time",
    "--ramp-up-start-rps": "write a scenario with a ramp over time",
    "--ramp-up-end-rps": "write a scenario with a ramp over time",
    "--tokenizer-mode": "a tokenizer.json is read as it is; leave it out",
    "--trust-remote-code": "no code of a model is ever run; leave it out",
    "--use-beam-search": "beam search is not asked for; leave it out",
    "--logprobs": "set extra_body of a class in a scenario, or --extra-body '{\"logprobs\": 1}'",
    "--probe-request-rate": "give the probes a class of their own in a scenario",
    "--profile": "profile the server by its own means",
    **{
        f"--timed-trace-label-{name}": "rename the column: timestamp, input_length, output_length, hash_ids are read"
        for name in ("timestamp", "input-length", "output-length", "hash-ids")
    },
    "--no-self-timed": "use --dataset-name burstgpt or custom with --request-rate for the lengths alone",
    "--request-id-prefix": "ids are the run's own",
    "--lora-modules": "name one adapter with --served-model-name",
    "--lora-assignment": "name one adapter with --served-model-name",
    "--ready-check-timeout-sec": "a server that does not answer is told at once",
    "--chat-template-kwargs": "use --extra-body '{\"chat_template_kwargs\": {...}}'",
    "--plot-timeline": "see the run with `sojourn ui`",
    "--timeline-itl-thresholds": "see the run with `sojourn ui`",
    "--plot-dataset-stats": "see the run with `sojourn ui`",
    "--disable-shuffle": "the seed always shuffles the rows; leave it out, or give them times and take timed_trace",
    "--no-oversample": "give --num-prompts of at most the rows that the file has",
    "--random-batch-size": "a request asks for one prompt; leave it out",
    "--hf-split": "download the data set, and name its file with --dataset-path",
    "--hf-subset": "download the data set, and name its file with --dataset-path",
}


@dataclass(frozen=True, slots=True)
class BenchServe:
    """The parsed flags: the load, the server, and the result file."""

    scenario: Scenario
    base_url: str
    model: str | None
    tokenizer: str | None
    seed: int
    run_dir: Path | None
    processes: int
    show_progress: bool
    save: "SaveResult | None"


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The file in vLLM's form: where, and what goes into it."""

    folder: Path
    filename: str | None
    detailed: bool
    append: bool
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    metadata: dict[str, str]
    label: str | None

    def path(self, document: dict[str, Any]) -> Path:
        """The given name, or the one that vLLM would choose."""
        closed = f"-concurrency{document['max_concurrency']}" if document["max_concurrency"] else ""
        model = str(document["model_id"]).rsplit("/", 1)[-1]
        usual = f"{self.label or document['backend']}-{document['request_rate']}qps{closed}-{model}-{document['date']}"
        return self.folder / (self.filename or f"{usual}.json")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse(arguments: list[str]) -> BenchServe:
    """Raises InputError or ScenarioError."""
    parser = flag_parser()
    for word in arguments:
        name = word.split("=", 1)[0]
        if name in REFUSED:
            raise InputError(f"`{name}` of vllm bench serve cannot be honoured here: {REFUSED[name]}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise InputError(f"`{unknown[0]}` is no flag of this command{nearest(unknown[0], known)}; see --help")
    stated = {name for name, value in vars(options).items() if value is not None}
    options.dataset_name = options.dataset_name or "random"
    _refuse_contradictions(options)
    return BenchServe(
        scenario=scenario_of(options, stated),
        base_url=options.base_url or f"http://{options.host or '127.0.0.1'}:{options.port or 8000}",
        model=options.served_model_name or options.model,
        tokenizer=options.tokenizer,
        seed=options.seed or 0,
        run_dir=Path(options.run_dir) if options.run_dir else None,
        processes=options.processes or 1,
        show_progress=not options.disable_tqdm,
        save=_save(options, stated),
    )


def flag_parser() -> argparse.ArgumentParser:
    """Every flag defaults to None, to distinguish given flags from absent ones."""
    parser = _Parser(prog="sojourn bench-serve", usage="sojourn bench-serve [OPTIONS]", allow_abbrev=False,
                     add_help=False, argument_default=None, epilog=epilog("bench-serve"))  # fmt: skip
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=list(BACKENDS), help="openai and vllm: completions; openai-chat: chat")
    server.add_argument("--base-url", help="such as http://127.0.0.1:8000")
    server.add_argument("--host", help="default 127.0.0.1")
    server.add_argument("--port", type=int, help="default 8000")
    server.add_argument("--endpoint", choices=list(ENDPOINTS.values()))
    server.add_argument("--model", help="default: the first that the server names")
    server.add_argument("--served-model-name", help="the name to ask for, where it differs from --model")
    server.add_argument("--tokenizer", help="folder with tokenizer.json; without one, prompts are counted in words")
    server.add_argument("--skip-tokenizer-init", action="store_true", help="the same as no --tokenizer")
    server.add_argument(
        "--header", nargs="+", metavar="KEY=VALUE", help="sent with each request; a key: SOJOURN_API_KEY"
    )
    server.add_argument("--insecure", action="store_true", help="take any TLS certificate")
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=int, help="default 1000")
    load.add_argument("--request-rate", type=float, help="per second; default inf: all at once")
    load.add_argument("--burstiness", type=float, help="1 Poisson, below bursty, above regular, inf constant")
    load.add_argument("--max-concurrency", "--concurrency", type=int, help="closed loop: requests in flight")
    load.add_argument("--num-warmups", type=int, help="sent and awaited before, and not measured")
    load.add_argument("--seed", type=int, help="default 0")
    data = parser.add_argument_group("prompts and answers")
    data.add_argument("--dataset-name", choices=DATASETS, help="default random")
    data.add_argument("--dataset-path")
    data.add_argument("--input-len", type=int)
    data.add_argument("--output-len", type=int)
    data.add_argument("--random-input-len", "--isl", type=int, help="default 1024")
    data.add_argument("--random-output-len", "--osl", type=int, help="default 128")
    data.add_argument("--random-range-ratio", help="default 0; a number, or JSON with input and output")
    data.add_argument("--random-prefix-len", type=int, help="default 0: shared by all, before --random-input-len")
    data.add_argument("--prefix-repetition-prefix-len", type=int, help="default 256")
    data.add_argument("--prefix-repetition-suffix-len", type=int, help="default 256")
    data.add_argument("--prefix-repetition-num-prefixes", type=int, help="default 10")
    data.add_argument("--prefix-repetition-output-len", type=int, help="default 128")
    data.add_argument("--sharegpt-output-len", type=int, help="default: what was answered")
    data.add_argument("--custom-output-len", type=int, help="default 256; -1: what the file says")
    data.add_argument("--self-timed", action="store_true", help="timed_trace does it anyway")
    data.add_argument("--timed-trace-sec-multiplier", type=float, help="seconds of a unit; default: what times imply")
    data.add_argument("--timed-trace-chunk-hash-size", type=int, help="tokens; default: what the lengths imply")
    data.add_argument("--ignore-eos", action="store_true", help="random and timed_trace do it anyway")
    for name in ("temperature", "top-p", "min-p", "presence-penalty", "frequency-penalty", "repetition-penalty"):
        data.add_argument(f"--{name}", type=float)
    data.add_argument("--top-k", type=int, help="-1 and 0: off")
    data.add_argument("--extra-body", type=_json_object, metavar="JSON", help="further keys of each request")
    results = parser.add_argument_group("results")
    results.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="ttft:500 tpot:50 e2el:20000")
    results.add_argument("--percentile-metrics", help="default ttft,tpot,itl")
    results.add_argument("--metric-percentiles", help="default 99")
    results.add_argument("--save-result", action="store_true", help="write vLLM's JSON")
    results.add_argument("--save-detailed", action="store_true", help="with a row a request")
    results.add_argument("--append-result", action="store_true", help="as one more line of the file")
    results.add_argument("--result-dir")
    results.add_argument("--result-filename")
    results.add_argument("--metadata", nargs="+", metavar="KEY=VALUE")
    results.add_argument("--label")
    results.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    results.add_argument("--run-dir", help="where the run goes; default: a new folder below runs/")
    results.add_argument("--processes", type=int, help=f"of the load generator, 1 to {MOST_PROCESSES}; default 1")
    for action in parser._actions:
        if action.const is True:  # an absent switch
            action.default = None
    return parser


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _refuse_contradictions(options: argparse.Namespace) -> None:
    if options.base_url and (options.host or options.port):
        raise InputError("--base-url names the server, and so do --host and --port; keep one of the two")
    if options.processes is not None and not 1 <= options.processes <= MOST_PROCESSES:
        raise InputError(f"--processes is {options.processes}; it must be 1 to {MOST_PROCESSES}")
    if options.tokenizer and options.skip_tokenizer_init:
        raise InputError("--tokenizer names a tokenizer that --skip-tokenizer-init would not read; keep one of the two")


def _save(options: argparse.Namespace, stated: set[str]) -> SaveResult | None:
    if not (options.save_result or options.append_result):
        if idle := stated & {"save_detailed", "result_dir", "result_filename", "metadata", "label",
                             "percentile_metrics", "metric_percentiles"}:  # fmt: skip
            raise InputError(
                f"{flag(sorted(idle)[0])} is of the result file, which nobody asked for; add --save-result"
            )
        return None
    metrics = tuple((options.percentile_metrics or "ttft,tpot,itl").split(","))
    for name in metrics:
        if name not in COLUMNS:
            raise InputError(f"--percentile-metrics names {name!r}; it takes {', '.join(COLUMNS)}")
    try:
        percentiles = tuple(float(each) for each in (options.metric_percentiles or "99").split(","))
    except ValueError:
        raise InputError(
            f"--metric-percentiles is {options.metric_percentiles!r}; it takes numbers: 50,90,99"
        ) from None
    if wrong := [each for each in percentiles if not 0 <= each <= 100]:
        raise InputError(f"--metric-percentiles has {wrong[0]:g}; a percentile lies between 0 and 100")
    return SaveResult(
        folder=Path(options.result_dir or "."), filename=options.result_filename, detailed=bool(options.save_detailed),
        append=bool(options.append_result), metrics=metrics, percentiles=percentiles, label=options.label,
        metadata=dict(pair(each, "=", "--metadata") for each in options.metadata or ()),
    )  # fmt: skip
