"""Published bounds by name: what users of a kind of work expect. `--slo preset:NAME` takes them.

Each names its source. The published percentile is part of it; Sojourn judges each request, and reports the share that
keeps its bounds. ITL bounds of the catalogue stand for TPOT.
"""

from typing import NamedTuple


class Preset(NamedTuple):
    bounds: dict[str, float]  # ms
    source: str


MLPERF = "mlperf.conf of MLPerf Inference (loadgen 6.0.17, mlcommons/inference b66003e1), 99th percentile"
CATALOGUE = "workload-catalog of kubernetes-sigs/inference-perf 7de5ef2"


def _of_catalogue(folder: str, percentiles: str, **bounds: float) -> Preset:
    return Preset(bounds, f"{CATALOGUE}, {folder}/config.json: {percentiles}")


def _of_mlperf(name: str, ttft_ms: float, tpot_ms: float) -> Preset:
    return Preset({"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}, f"{MLPERF}: {name}")


PRESETS = {
    "interactive-chat": _of_catalogue("interactive-chat", "TTFT p99, ITL p99", ttft_ms=1000, tpot_ms=50),
    "code-generation": _of_catalogue("code-generation", "TTFT p95, ITL p99", ttft_ms=30_000, tpot_ms=100),
    "agentic-coding": Preset(
        {"ttft_ms": 2000, "tpot_ms": 15},
        f"{MLPERF}: gpt-oss-120b-interactive; AA-AgentPerf has tiers of TTFT and output speed by model, which change "
        "with the market (artificialanalysis.ai/methodology/agentperf)",
    ),
    "reasoning": _of_catalogue("reasoning", "TTFT p99, ITL p99", ttft_ms=2000, tpot_ms=100),
    "rag": Preset(
        {"ttft_ms": 2000, "tpot_ms": 200},
        f"{MLPERF}: llama2-70b server; no bound of RAG with a waiting reader is known to us, and batch-summarisation "
        "has that of RAG in batches",
    ),
    "deep-research": _of_catalogue("deep-research", "TTFT p90, ITL p99", ttft_ms=10_000, tpot_ms=100),
    "batch-summarisation": _of_catalogue(
        "batch-summarization-rag", "TTFT p90, ITL p95, E2E p99", ttft_ms=15_000, tpot_ms=150, e2e_ms=630_000
    ),
    "mlperf-llama2-70b": _of_mlperf("llama2-70b server", 2000, 200),
    "mlperf-llama2-70b-interactive": _of_mlperf("llama2-70b-interactive", 450, 40),
    "mlperf-llama3.1-8b": _of_mlperf("llama3_1-8b server", 2000, 100),
    "mlperf-llama3.1-8b-interactive": _of_mlperf("llama3_1-8b-interactive", 500, 30),
    "mlperf-llama3.1-405b": _of_mlperf("llama3_1-405b server", 6000, 175),
    "mlperf-llama3.1-405b-interactive": _of_mlperf("llama3_1-405b-interactive", 4500, 80),
    "mlperf-mixtral-8x7b": _of_mlperf("mixtral-8x7b server", 2000, 200),
    "mlperf-deepseek-r1": _of_mlperf("deepseek-r1 server", 2000, 80),
    "mlperf-deepseek-r1-interactive": _of_mlperf("deepseek-r1-interactive", 1500, 15),
    "mlperf-gpt-oss-120b": _of_mlperf("gpt-oss-120b server", 3000, 80),
    "mlperf-gpt-oss-120b-interactive": _of_mlperf("gpt-oss-120b-interactive", 2000, 15),
}
KEYS = ("ttft_ms", "tpot_ms", "e2e_ms")
PREFIX = "preset:"


def preset_of(word: str) -> Preset | None:
    """Of `preset:NAME`; None for another word. Raises ValueError with the names."""
    if not word.lower().startswith(PREFIX):
        return None
    name = word[len(PREFIX) :].lower()
    if name not in PRESETS:
        raise ValueError(f"{word!r} is no preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def table_of_presets() -> str:
    """As a page of the documentation shows them."""
    lines = ["| preset | TTFT ms | TPOT ms | E2E ms | source |", "|---|---|---|---|---|"]
    for name, preset in PRESETS.items():
        cells = [
            f"{preset.bounds[key]:,.0f}" if key in preset.bounds else "" for key in ("ttft_ms", "tpot_ms", "e2e_ms")
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {preset.source} |")
    return "\n".join(lines) + "\n"
