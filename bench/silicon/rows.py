"""The public measurements: rows of the file in `aiconfigurator-core`, as deployments and loads, or why one is none."""

import re
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sojourn.replay.device.estimate import Deployment

# The file's names that are not those of the bundled shapes or of the package.
MODELS = {
    "nvidia/Llama-3.1-8B-Instruct-FP8": "Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct": "Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "Llama-3.1-70B", "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "zhipuai/GLM-5": "zai-org/GLM-5-FP8", "nvidia/DeepSeek-R1-NVFP4": "DeepSeek-R1",
    "nvidia/DeepSeek-V3.1-NVFP4": "DeepSeek-V3", "nvidia/Qwen3-32B-NVFP4": "Qwen3-32B",
    "deepseek-ai/DeepSeek-R1": "DeepSeek-R1", "deepseek-ai/DeepSeek-V3": "DeepSeek-V3", "Qwen/Qwen3-32B": "Qwen3-32B",
    "openai/gpt-oss-120b": "gpt-oss-120b", "MiniMaxAI/MiniMax-M2.5": "MiniMax-M2.5",
}  # fmt: skip
FORMATS = {"nvfp4": "nvfp4", "int4_wo": "int4", "fp8": "fp8", "fp8_block": "fp8_block"}


class Measured(NamedTuple):
    """One measurement: a deployment under a closed loop of equal requests."""

    place: int  # in the file
    deployment: Deployment
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float

    @property
    def e2e_ms(self) -> float:
        return self.ttft_ms + (self.output_tokens - 1) * self.tpot_ms

    @property
    def point(self) -> tuple[Deployment, int, int, int]:
        return self.deployment, self.prompt_tokens, self.output_tokens, self.concurrency


def read_rows(path: Path | None = None) -> tuple[list[Measured], list[tuple[str, str, str]]]:
    """The rows of one server, and (model, device, reason) of each that cannot be judged. Raises OSError."""
    package = Path(str(resources.files("aiconfigurator_core")))
    frame = pd.read_csv(path or package / "systems" / "silicon_sample.csv")
    frame = frame[frame["mode"] == "agg"]
    kept, refused = [], []
    for place, row in enumerate(frame.itertuples(index=False)):
        model = MODELS.get(row.model_path, row.model_path)
        if (reason := _fault(row)) is not None:
            refused.append((model, row.system, reason))
            continue
        tensor, expert = int(row.tp_size), int(row.moe_ep_size or 1)
        deployment = Deployment(
            model=model, device=row.system, backend=row.backend, tensor_parallel=tensor,
            expert_parallel=expert if expert <= tensor else 1, weight_format=_format(row),
        )  # fmt: skip
        kept.append(
            Measured(
                place, deployment, int(row.isl), int(row.osl), int(row.batch_size), float(row.silicon_ttft_ms),
                float(row.silicon_tpot_ms),
            )
        )  # fmt: skip
    return kept, refused


def _fault(row: object) -> str | None:
    """What is wrong with a row, or what it has that no estimate here has."""
    if row.attention_dp_size > 1:  # NaN: not said, and no row of such a model
        return "attention is data parallel"
    said = re.search(r"silicon_concurrency=(\d+)", row.silicon_data_source)
    if said is not None and int(said[1]) != int(row.batch_size):
        return "its columns disagree about the concurrency"
    named = re.search(r"_tp(\d+)", row.id)
    if named is not None and int(named[1]) != int(row.tp_size):
        return "its columns disagree about the devices"
    return None


def _format(row: object) -> str:
    if "gpt-oss" in row.model_path:
        return "mxfp4"  # the file says nvfp4; the checkpoint has no other
    if not isinstance(row.gemm_quant_mode, str):
        return "bf16"
    is_dense = "Llama" in row.model_path or row.model_path.endswith("Qwen3-32B")
    return FORMATS[row.gemm_quant_mode if is_dense else row.moe_quant_mode]
