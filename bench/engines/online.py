"""Online latency and throughput: servers as their users meet them, with a fixed number of requests at a time."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engines.client_process import run_client
from bench.engines.servers import Server, llama_server, our_server, vllm_server
from bench.report.breakdown import complaint, explain, steps_of_table, utilisation
from bench.report.ceilings import measured_ceilings, precision_of
from bench.results import BenchError, Report, new_report
from bench.shapes import add_tokenizer, model_to_bench, vocab_size
from bench.variants import BASE, check_settings
from bench.workloads import Workload, cpu_sized, streams
from sojourn.engine.config import model_folder
from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.recorder import ON_DISK_SECONDS

LEAST_REQUESTS = 3  # of one concurrency
LONGEST_OF_BURST = 384  # tokens of a sequence, at most
# Until the records of the last step are on the disk.
RECORDED_SECONDS = 1.5 * ON_DISK_SECONDS
LLAMA_SLOTS = 32


@dataclass(frozen=True, slots=True)
class OnlineOptions:
    """The options of `sojourn dev bench online`."""

    model: str
    concurrency: list[int] = field(default_factory=lambda: [1, 8, 32])
    input_len: int = 128
    output_len: int = 64
    requests_per_stream: int = 3
    max_requests: int | None = None  # of one concurrency
    burst: bool = False  # also the CPU-sized workload, all at once
    settings: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    vllm: str | None = None  # the Python that has it
    llama_server: str | None = None  # the binary
    gguf: list[str] = field(default_factory=list)  # its models: one contender each
    repeats: int = 3
    one_at_a_time: bool = False

    @property
    def max_model_len(self) -> int:
        """Tokens that every server must have room for in a sequence, in steps of 256."""
        longest = max(self.input_len + self.output_len, LONGEST_OF_BURST if self.burst else 0)
        return -(-longest // 256) * 256


def bench_online(
    options: OnlineOptions, folder: Path, show: Callable[[str], None], save: Callable[[Report], None]
) -> Report:
    """Measures every server at every point `repeats` times, in turns; `save` gets the report as it grows. A server
    that fails leaves a note, unless it is the first. Raises BenchError.
    """
    model, load_format = model_to_bench(options.model, folder)
    if Path(model).is_relative_to(folder):
        add_tokenizer(Path(model))
    elif not (model_folder(model) / "tokenizer.json").is_file():
        raise BenchError(
            f"{model} has no tokenizer.json, which a server needs; give its config.json itself, or use a checkpoint"
        )
    ids = vocab_size(model)
    servers = _servers(options, model, load_format, folder)
    device = _device(options.settings)
    ceilings = measured_ceilings(device, show)
    report = new_report("online", f"{Path(model).name}, {options.input_len} in, {options.output_len} out, streamed")
    report.ceilings = ceilings
    report.workload = {"input_len": options.input_len, "output_len": options.output_len}
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        for repeat in range(options.repeats):
            for server in list(servers):
                try:
                    _turn(report, server, ids, repeat, options, ceilings, show)
                except BenchError as error:
                    if server is servers[0]:
                        raise
                    servers.remove(server)
                    server.stop()
                    report.notes.append(f"Given up: {error}")
                    show(f"given up: {error}")
                save(report)
    return report


def _turn(
    report: Report, server: Server, vocab_size: int, repeat: int, options: OnlineOptions, ceilings: Ceilings,
    show: Callable[[str], None],
) -> None:  # fmt: skip
    server.start()
    run_client(server, streams(1, options.input_len, 8, seed=repeat).within(vocab_size), 1, stream=True)
    for point, workload, concurrency in _points(options, repeat):
        measured = run_client(server, workload.within(vocab_size), concurrency, stream=workload.name != "burst")
        _book(report, server, point, measured, ceilings)
        figures = measured["figures"]
        ttft = f", TTFT p50 {figures['ttft_p50_ms']:,.0f} ms" if "ttft_p50_ms" in figures else ""
        show(f"{server.name}, {point}: {figures['output_tokens_per_s']:,.1f} output tokens/s{ttft}")
    if options.one_at_a_time and not server.slow_start:
        server.stop()


def _device(settings: dict[str, Any]) -> str:
    """As the engine will name it."""
    import torch

    cuda = torch.cuda.is_available() and settings.get("device", "auto") != "cpu"
    return torch.cuda.get_device_name() if cuda else "cpu"


def _points(options: OnlineOptions, repeat: int) -> list[tuple[str, Workload, int]]:
    """Name, requests and concurrency of each point. Every repeat has prompts that no server has seen."""
    points = []
    for concurrency in dict.fromkeys(options.concurrency):  # twice the same prompts would meet a warm cache
        count = max(LEAST_REQUESTS, concurrency * options.requests_per_stream)
        count = max(concurrency, min(count, options.max_requests or count))
        workload = streams(count, options.input_len, options.output_len, seed=1000 * (repeat + 1) + concurrency)
        points.append((f"c={concurrency}", workload, concurrency))
    if options.burst:
        workload = cpu_sized().reworded(repeat + 1)
        points.append(("64 at once", Workload("burst", workload.prompts, workload.output_lens), len(workload.prompts)))
    return points


def _servers(options: OnlineOptions, model: str, load_format: str, folder: Path) -> list[Server]:
    base = {
        "load_format": load_format, "max_model_len": options.max_model_len,
        "num_kv_blocks": max(64, *options.concurrency) * options.max_model_len // 16,
    } | options.settings  # fmt: skip
    servers = []
    for name, changed in ({BASE: {}} | options.variants).items():
        check_settings(model, base | changed)
        servers.append(our_server(name, model, base | changed, folder / "runs" / name))
    if options.vllm is not None:
        servers.append(vllm_server("vllm", options.vllm, model, options.max_model_len))
    if (options.llama_server is None) != (not options.gguf):
        raise BenchError("--peer llama-server=BINARY and --peer-model FILE.gguf go together; give both")
    for gguf in options.gguf:
        if not Path(gguf).expanduser().is_file():
            raise BenchError(f"--peer-model {gguf}: there is no such file")
        name = f"llama-server {Path(gguf).stem.rpartition('-')[2]}"
        servers.append(llama_server(name, options.llama_server, gguf, LLAMA_SLOTS, options.max_model_len))
    return servers


def _book(report: Report, server: Server, name: str, measured: dict[str, Any], ceilings: Ceilings) -> None:
    point = report.at(server.name, name)
    if not point.figures:
        point.settings, point.peer = server.settings, server.version is not None
        point.version = server.version() if server.version is not None else ""
    figures, breakdown = dict(measured["figures"]), None
    if server.run_dir is not None:
        time.sleep(RECORDED_SECONDS)
        begin_ns, end_ns = measured["begin_ns"], measured["end_ns"]
        steps = steps_of_table(RunDirectory(server.run_dir).table("steps"), begin_ns, end_ns)
        breakdown = explain(steps, begin_ns, end_ns)
        precision = precision_of(server.settings, _dtype(server.settings))
        figures |= utilisation(steps, end_ns - begin_ns, ceilings, precision)
        if sentence := complaint(breakdown):
            report.notes.append(f"{server.name}, {name}: {sentence}")
    point.add(figures, breakdown)


def _dtype(settings: dict[str, Any]) -> str:
    """The compute dtype that the engine chooses."""
    wanted = settings.get("dtype", "auto")
    return wanted if wanted != "auto" else "float32" if _device(settings) == "cpu" else "bfloat16"
