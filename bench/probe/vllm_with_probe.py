"""vLLM on a CPU, with the probe or without it. The probe is taken from this tree."""

import os
from pathlib import Path

from bench.engines.servers import HOST, Server
from bench.json_process import ROOT

PROBE = ROOT / "probe"
TINY_MODEL = ROOT / "scenarios" / "tiny-model"


def vllm_with_probe(
    python: str, record: Path | None, *flags: str, max_model_len: int = 2048, times: Path | None = None,
    threads: int | None = None, module: str = "sojourn_probe.vllm", model: Path = TINY_MODEL,
) -> Server:  # fmt: skip
    """The model, by default the bundled one, in float32 on all cores, or the first `threads`.
    `record` is the probe's folder; None: a server without a probe.

    `module` has the scheduler and the middleware: the probe's own, or one that clocks or switches them
    (bench.probe.timed, bench.probe.switched) and writes files whose names begin with `times`.
    """
    attach = ("--scheduler-cls", f"{module}.Scheduler", "--middleware", f"{module}.Middleware")
    cores = sorted(os.sched_getaffinity(0))[:threads]
    chosen = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
    }  # fmt: skip
    if record is not None:
        chosen |= {"SOJOURN_PROBE": str(record), "PYTHONPATH": f"{PROBE}:{ROOT}", "SOJOURN_PROBE_TIMES": str(times)}

    def command(port: int) -> list[str]:
        return [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
            "--dtype", "float32", "--max-model-len", str(max_model_len), "--enforce-eager", "--host", HOST, "--port",
            str(port), *(attach if record is not None else ()), *flags,
        ]  # fmt: skip

    name = "without probe" if record is None else "with probe"
    return Server(name, "m", command, environment=chosen, slow_start=True)
