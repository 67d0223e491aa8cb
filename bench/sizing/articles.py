"""The page: each figure that articles on serving state, with its arithmetic, `size`, and measured silicon beside it."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench.silicon.rows import Measured, read_rows
from bench.sizing.agreement import read_agreement
from bench.sizing.split import Judged, judge, summary
from sojourn.loadgen.sweeps.ladder import rungs
from sojourn.metrics.compute.memory_plan import GIB, kv_formula, memory_plan
from sojourn.metrics.compute.model_catalog import find_model
from sojourn.metrics.compute.model_sizes import ModelSizes
from sojourn.metrics.compute.rank_shape import kv_bytes_per_token, rank_shape
from sojourn.replay.device.catalogue import device_named
from sojourn.replay.device.estimate import Deployment, DeviceEstimate, DeviceStep, OutsideTables
from sojourn.replay.device.makers import estimate_of
from sojourn.replay.device.simulate import server_config
from sojourn.replay.sizing.limit import Server
from sojourn.replay.sizing.load import SizedLoad

PAGE = Path(__file__).parents[2] / "docs" / "results" / "sizing.md"
DEVICE = "h100_sxm"
CONTEXT = 1024  # past tokens of a sequence, in the rows of batches
SLOTS, REQUESTS = 384, 1200  # of the ladder's load
SHARED_TOKENS = 512


def page() -> str:
    device = device_named(DEVICE)
    rows = [row for row in read_rows()[0] if row.deployment.device == DEVICE and row.deployment.backend == "vllm"]
    parts = [
        "# Sizing: the articles' figures, recomputed",
        "This page answers: what do the figures that articles on serving state come from, and what do measured kernels "
        "and public measurements say of them? `python -m bench.sizing` wrote it, with the functions of `sojourn size`.",
        f"Date: {datetime.now(UTC):%Y-%m-%d}. Device: {device.title}, {device.bandwidth_gbs / 1e3:.2f} TB/s, "
        f"{device.flops['bf16']:,.0f} TFLOP/s in bf16 ({device.source}). *Kernels* are the tables of "
        "aiconfigurator-core. *Public* are measurements of whole servers in the same package.",
        *_one_token(), *_small_and_large(), *_batch(rows), *_kv(), *_multipliers(), *_split(), *_agreement(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _one_token() -> list[str]:
    sizes, bandwidth = find_model("Llama-3.1-70B"), device_named(DEVICE).bandwidth_gbs * 1e9
    moved = 2 * 70e9
    read = rank_shape(sizes, "fp16", "fp16").weight_bytes
    lines = [
        ("stated: 70 B × 2 bytes", f"{moved / 1e9:,.0f} GB", moved / bandwidth),
        ("counted: weights that a step reads, without the table of embeddings", f"{read / 1e9:,.1f} GB",
         read / bandwidth),
    ]  # fmt: skip
    table = _table(
        ("what", "bytes", "ms per token", "tokens/s"),
        [(what, size, f"{1e3 * took:.1f}", f"{1 / took:.1f}") for what, size, took in lines],
    )
    plan = memory_plan(sizes, device_named(DEVICE).memory_gib * GIB, weights="fp16")
    measured = []
    for degree in (2, 4, 8):
        bound = rank_shape(sizes, "fp16", "fp16", degree).weight_bytes / bandwidth * 1e3
        took = _kernels("Llama-3.1-70B", degree, "bf16", DeviceStep((), 1, CONTEXT))
        measured.append((f"{degree}", f"{bound:.1f}", took, _of(bound, took)))
    return [
        "## 70 B parameters at FP16: 140 GB per token, 42 ms, 24 tokens/s",
        "A single sequence reads all weights for each token: bytes / bandwidth.",
        table,
        f"No such server exists: of {plan.device_bytes / GIB:.0f} GiB the weights alone would take "
        f"{plan.weights.total / GIB:.0f}. On several devices each rank reads its share, and they exchange results:",
        _table(("devices", "weights of a rank / bandwidth, ms", "kernels, ms", "kernels / bound"), measured),
    ]


def _small_and_large() -> list[str]:
    bandwidth, memory = device_named(DEVICE).bandwidth_gbs * 1e9, device_named(DEVICE).memory_gib * GIB
    lines = []
    for name in ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B"):
        sizes = find_model(name)
        read = rank_shape(sizes, "fp16", "fp16").weight_bytes
        degree = next((each for each in (1, 2, 4, 8, 16, 32) if memory_plan(
            sizes, memory, weights="fp16", tensor_parallel=each).fits), 0)  # fmt: skip
        took = _kernels(name, degree, "bf16", DeviceStep((), 1, CONTEXT)) if degree <= 8 else "–"
        lines.append((
            name, f"{sizes.parameters / 1e9:,.1f}", f"{read / 1e9:,.1f}", f"{1e3 * read / bandwidth:.1f}",
            f"{bandwidth / read:,.1f}", f"{degree}", f"{1e3 * read / bandwidth / degree:.1f}", took,
        ))  # fmt: skip
    return [
        "## 8 B against 405 B",
        "The same arithmetic. *Fits on* is the smallest power of two whose memory plan has room for keys and values.",
        _table(("model", "parameters, B", "GB read", "ms at one device's bandwidth", "tokens/s", "fits on",
                "ms there", "kernels there, ms"), lines),
    ]  # fmt: skip


def _batch(rows: Sequence[Measured]) -> list[str]:
    sizes, device = find_model("Llama-3.1-70B"), device_named(DEVICE)
    shape = rank_shape(sizes, "fp8", "bf16", 2)
    lines = []
    first: dict[int, float] = {}
    for batch in (1, 4, 16, 32, 128):
        kv = batch * CONTEXT * shape.kv_bytes_per_token
        bound = 1e3 * (shape.weight_bytes + kv) / (device.bandwidth_gbs * 1e9)
        first.setdefault(0, bound)
        took = _kernels("Llama-3.1-70B", 2, "fp8", DeviceStep((), batch, batch * CONTEXT))
        lines.append((
            f"{batch}", f"{shape.weight_bytes / 1e9:,.1f} + {kv / 1e9:,.2f}", f"{bound:.1f}",
            f"{batch * first[0] / bound:.1f}", took, _public(rows, "Llama-3.1-70B", 2, "fp8", batch),
        ))  # fmt: skip
    return [
        "## Batch 32",
        "A step reads the weights once for all sequences, and the keys and values of each. So 32 sequences cost little "
        "more than one, and the tokens per second grow nearly 32 times. Llama-3.1-70B in fp8 on 2 devices, each "
        f"sequence at {CONTEXT:,} tokens; *public* is the TPOT of a server with prompts and answers of 1,024 tokens.",
        _table(("batch", "GB of a rank: weights + KV", "bytes / bandwidth, ms", "× tokens/s of batch 1", "kernels, ms",
                "public, ms"), lines),
    ]  # fmt: skip


def _kv() -> list[str]:
    lines = []
    for name, kind in (("Llama-2-7B", "MHA"), ("Llama-3.1-8B", "GQA, 8 of 32"), ("Gemma-2B", "MQA"),
                       ("Llama-3.1-70B", "GQA, 8 of 64"), ("Llama-3.1-405B", "GQA, 8 of 128"),
                       ("gpt-oss-120b", "GQA, half of the layers with a window"),
                       ("DeepSeek-V3", "MLA")):  # fmt: skip
        sizes = find_model(name)
        each, whole = kv_bytes_per_token(sizes, "fp16"), 2 * sizes.num_layers * sizes.num_heads * _head(sizes) * 2
        lines.append((name, kind, kv_formula(sizes, "fp16"), f"{each:,}", f"{whole / each:.1f}", f"{GIB // each:,}"))
    return [
        "## Keys and values of a token",
        "MHA has keys and values of each head, GQA of each group, MQA of one; MLA a latent for all. *× of MHA* is how "
        "many times smaller that is than a head's own keys and values. DeepSeek's paper (ISCA 2025, table 1) has "
        "70.272 kB for DeepSeek-V3 and 516.096 kB for Llama-3.1-405B: the same numbers.",
        _table(("model", "kind", "formula", "bytes", "× of MHA", "tokens in 1 GiB"), lines),
    ]  # fmt: skip


def _head(sizes: ModelSizes) -> int:
    return sizes.head_dim if sizes.latents is None else (sizes.latents.nope_dim + sizes.latents.value_dim) // 2


def _multipliers() -> list[str]:
    """The rungs that a simulation can climb: those of the scheduler, of memory, and of the format."""
    bf16, fp8 = (_estimate("Llama-3.1-70B", 4, each) for each in ("bf16", "fp8"))
    load = _ladder_load()
    alone = SizedLoad(**{name: getattr(load, name) for name in load.__dataclass_fields__ if name != "paths"
                         and not name.startswith("_")})  # fmt: skip
    steps: dict[str, tuple[DeviceEstimate, SizedLoad, dict]] = {
        "static batching": (bf16, alone, {"policy": "static", "block_size": 1024}),
        "continuous batching": (bf16, alone, {"block_size": 1024}),
        "paged KV cache": (bf16, alone, {}),
        "quantised weights": (fp8, alone, {}),
        "prefix cache": (fp8, load, {}),
    }
    lines, before = [], 0.0
    for rung in rungs("cuda"):
        stated = "–" if rung.published is None else f"{rung.published:g}"
        if rung.name not in steps:
            lines.append((rung.name, stated, "–", "–", "a kernel's or the host's: the tables have the fast ones alone"))
            continue
        estimate, own, settings = steps[rung.name]
        if size := settings.get("block_size"):
            settings = {**settings, "num_kv_blocks": estimate.kv_tokens // size}
        found = Server(estimate, server_config(estimate, **settings), own, None, at_a_time=REQUESTS / 6)
        trial = found.at_slots(SLOTS)
        now = trial.output_tokens_per_s
        lines.append((
            rung.name, stated, "–" if not before else f"{now / before:.2f}", f"{now:,.0f}",
            f"{trial.in_flight:,.0f} open, {trial.most_running:,} in a step, TPOT {trial.tpot_ms['p50']:.1f} ms",
        ))  # fmt: skip
        before = now
    return [
        "## The ladder's multipliers",
        f"Llama-3.1-70B on 4 devices with {SLOTS} requests at any time, prompts of about 1,024 tokens of which "
        f"{SHARED_TOKENS} are shared, answers of about 256. Each rung is the engine's own scheduler with the setting "
        "of `sojourn dev ladder` ([measured on a CPU](ladder.md)), on kernel times. *× below* is of tokens per second.",
        _table(("rung", "article", "× below", "tokens/s", "what changed"), lines),
    ]


def _ladder_load() -> SizedLoad:
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(1024), 0.4, REQUESTS * 4), 640, 4096).astype(int)
    outputs = np.clip(rng.lognormal(np.log(220), 0.6, REQUESTS * 4), 16, 1024).astype(int)
    count = len(prompts)
    return SizedLoad(
        name="ladder", klass=np.full(count, "all", dtype=object), prompt_tokens=prompts, output_tokens=outputs,
        offset_s=np.arange(count, dtype=float), follows=np.full(count, -1), pause_s=np.zeros(count), slots=SLOTS,
        paths=[[("shared", SHARED_TOKENS)]] * count,
    )  # fmt: skip


def _split() -> list[str]:
    found, refused = judge()
    groups: dict[tuple[str, str], list[Judged]] = {}
    for each in found:
        groups.setdefault((each.device, each.backend), []).append(each)
    lines = [
        (name, f"{len(rows)}", *(f"{median:.0%} / {p90:.0%} / {bias:+.0%}" for median, p90, bias in
                                 (summary(rows)[figure] for figure in ("tpot", "throughput"))))
        for name, rows in [("all", found)] + [(", ".join(key), rows) for key, rows in sorted(groups.items())]
    ]  # fmt: skip
    why = ", ".join(f"{count:,} ({reason})" for reason, count in refused.most_common())
    return [
        "## Prefill and decode servers apart",
        f"Public measurements of split deployments: {len(found) + sum(refused.values()):,}, of which {len(found)} can "
        f"be judged; not: {why}. TPOT is that of a decode step at the measured batch. The rate is that of the slower "
        "side: prompts by the prefill servers, answers by the decode servers, as `size` says it of a split.",
        _table(("device, backend", "n", "TPOT: median / p90 / bias", "requests/s: median / p90 / bias"), lines),
    ]


def _agreement() -> list[str]:
    found = read_agreement()
    if not found:
        return []
    lines = [
        (each.server, each.machine, each.date, each.steps_of, f"{each.rate_rps:.3g}", f"{each.requests:,}",
         f"{each.measured_tpot_ms['p50']:.1f} / {each.measured_tpot_ms['p90']:.1f}",
         f"{each.said_tpot_ms['p50']:.1f} / {each.said_tpot_ms['p90']:.1f}", f"{each.tpot_error:+.1%}",
         f"{each.measured_tokens_per_s:,.0f}", f"{each.said_tokens_per_s:,.0f}", f"{each.capacity_ratio:.2f}")
        for each in found
    ]  # fmt: skip
    return [
        "## Given a server's own steps",
        "`size` gets the fitted steps of one recorded run, and the load of each run of that server: "
        "`python -m bench.sizing agree RUN [OTHER...]`. Above the server's capacity the tokens per second are its "
        "capacity.",
        _table(("server", "machine", "date", "steps of", "req/s sent", "requests", "measured TPOT p50 / p90, ms",
                "said", "error of p50", "measured tokens/s", "said", "said / measured"), lines),
    ]  # fmt: skip


def _estimate(model: str, degree: int, weights: str) -> DeviceEstimate:
    return estimate_of(
        Deployment(model=model, device=DEVICE, tensor_parallel=degree, weight_format=weights), "kernels"
    )  # fmt: skip


def _kernels(model: str, degree: int, weights: str, step: DeviceStep) -> str:
    try:
        return f"{_estimate(model, degree, weights).device_ns(step) / 1e6:.1f}"
    except OutsideTables:
        return "–"


def _of(bound: float, took: str) -> str:
    return "–" if took == "–" else f"{float(took) / bound:.2f}"


def _public(rows: Sequence[Measured], model: str, degree: int, weights: str, batch: int) -> str:
    """The median TPOT of the measurements with prompts and answers of 1,024 tokens."""
    found = [
        row.tpot_ms for row in rows
        if (row.deployment.model, row.deployment.tensor_parallel) == (model, degree)
        and row.deployment.weight_format == weights
        and (row.prompt_tokens, row.output_tokens, row.concurrency) == (1024, 1024, batch)
    ]  # fmt: skip
    return f"{np.median(found):.1f}" if found else "–"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows])
