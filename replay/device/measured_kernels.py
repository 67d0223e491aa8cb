"""Step times of measured GPU kernels: the one module that touches `aiconfigurator-core`.

Of the package only `EngineHandle` and `estimate_kv_cache` are used, so that another distribution with the same import
name can replace it. It is an optional extra. What it does not say by itself is guarded here:

- It extrapolates batch and context without a word: bounds below.
- It guesses where a table is missing, if asked to (its mode HYBRID): never asked, and an answer that is not of
  measurements is refused.
- A model that it does not know it would download: only its own names and local folders pass.
- A decode's context is its `isl + osl / 2`; the attention of a prompt comes divided by the number of its chunks.
- It needs a version to estimate memory: `current`, the only one that it answers for.
"""

import atexit
import difflib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from sojourn.metrics.compute.model_catalog import config_path, known_name, published_models
from sojourn.metrics.compute.model_sizes import EXPERTS
from sojourn.metrics.installed import PackageMissing, install_command, is_installed
from sojourn.replay.device.catalogue import catalogue
from sojourn.replay.device.composition import SERVING
from sojourn.replay.device.estimate import Composition, Deployment, DeviceStep, KnownError, OutsideTables

PACKAGE = "aiconfigurator_core"
MOST_DECODES = 1024  # sequences of a step: of latent attention the tables have no more
MOST_CONTEXT = 131_072  # positions of a sequence
MOST_STEP_TOKENS = 16_384  # of the experts' tables
MOST_DEVICES = 8  # of the tables of all-reduce
UNMEASURED = ("l4", "a30", "h100_pcie", "a100_pcie")  # it describes them, and has no measurement
# Weight format → the modes of matrices and of experts, in order of trial.
MODES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "bf16": (("bfloat16", "bfloat16"),),
    "fp8": (("fp8", "fp8"),),
    "fp8_block": (("fp8_block", "fp8_block"),),
    "int8": (("int8_wo", "int8_wo"),),
    "int4": (("int4_wo", "int4_wo"),),
    "nvfp4": (("nvfp4", "nvfp4"),),
}
# Formats that only the experts have: the other matrices stay as they were trained.
EXPERT_MODES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "int4": (("bfloat16", "int4_wo"),),
    "mxfp4": tuple(
        ("bfloat16", mode) for mode in ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "w4a8_mxfp4_mxfp8_trtllm",
                                        "w4a16_mxfp4_cutlass")
    ),
}  # fmt: skip
KV_MODES = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8"}


def known_models() -> dict[str, Path]:
    """The models that the package describes: name on Hugging Face → its config.json."""
    folder = Path(str(resources.files(PACKAGE))) / "model_configs"
    return {
        path.name.removesuffix("_config.json").replace("--", "/"): path
        for path in sorted(folder.glob("*_config.json"))
        if not path.name.endswith("_hf_quant_config.json")
    }


def measured_kernels(deployment: Deployment, error: KnownError | None = None) -> "MeasuredKernels":
    """The estimate of a deployment. Raises PackageMissing, OutsideTables."""
    if not is_installed(PACKAGE):
        raise PackageMissing(f"times of measured kernels need {PACKAGE}; install it: {install_command([PACKAGE])}")
    return MeasuredKernels(deployment, error)


class MeasuredKernels:
    """A `DeviceEstimate` of the package's tables."""

    def __init__(self, deployment: Deployment, error: KnownError | None) -> None:
        self.deployment, self.error = deployment, error
        if deployment.backend not in ("vllm", "sglang", "trtllm"):
            raise OutsideTables(f"kernels are measured as vllm, sglang and trtllm run them, not {deployment.backend}")
        serving = SERVING[deployment.backend]
        self.composition: Composition = serving.composition
        self.host_ns = serving.host_ns
        model, config = _model(deployment.model)
        _check(deployment)
        try:
            self._modes, self._handle = _compiled(deployment, model, config)
        except OutsideTables as refused:
            if "download" not in str(refused):
                raise
            model = str(_folder_of(known_models()[model]))  # it describes this one, and does not look there
            self._modes, self._handle = _compiled(deployment, model, config)
        self.kv_tokens = _kv_tokens(deployment, model, self._modes)
        self.provenance = f"kernels measured by NVIDIA, aiconfigurator-core {metadata.version('aiconfigurator-core')}"
        self._shared = lru_cache(65536)(self._shared_ms)
        self._prompt = lru_cache(65536)(self._prompt_ms)

    def device_ns(self, step: DeviceStep) -> float:
        decodes = step.decodes
        past = round(step.decode_past_tokens / decodes) if decodes else 0
        chunk_tokens = step.chunk_tokens
        if decodes > MOST_DECODES or past >= MOST_CONTEXT or decodes + chunk_tokens > MOST_STEP_TOKENS:
            raise OutsideTables(
                f"a step of {decodes} decodes at {past} positions and {chunk_tokens} prompt tokens is outside of the "
                f"tables: they have {MOST_DECODES} decodes, {MOST_CONTEXT} positions, {MOST_STEP_TOKENS} tokens"
            )
        if not step.chunks:
            return 1e6 * self._handle.decode_step_latency(decodes, max(past, 1), 2) if decodes else 0.0
        shared, decode = self._shared(chunk_tokens, decodes, past)
        return 1e6 * (shared + decode + math.fsum([self._prompt(new, past) for new, past in step.chunks]))

    def _shared_ms(self, chunk_tokens: int, decodes: int, past: int) -> tuple[float, float]:
        """Of all tokens but their attention, and the attention of the decodes."""
        _, shared, _, decode = self._handle.mixed_step_breakdown(chunk_tokens, decodes, max(past, 1), 2)
        return shared, decode

    def _prompt_ms(self, new: int, past: int) -> float:
        """Attention of one chunk. The package divides it by the chunks of its prompt."""
        if past + new > MOST_CONTEXT:
            raise OutsideTables(f"a prompt of {past + new} tokens is outside of the tables: they have {MOST_CONTEXT}")
        attention = self._handle.mixed_step_breakdown(new, 0, past + new, 2, prefix=past)[2]
        return attention * -(-(past + new) // new)


def _model(name: str) -> tuple[str, dict[str, Any]]:
    """What the package is asked for, and its config.json: its own model of that name, or a folder. Raises
    OutsideTables."""
    if (file := config_path(name)) is not None:
        config = _read(file)
        is_readable = file.name == "config.json" and _as_known(config) is config
        return str(file.parent if is_readable else _folder_of(file)), config
    known, meant = known_models(), known_name(name) or name
    for each in known:
        if meant.casefold() in (each.casefold(), each.split("/")[-1].casefold(), (known_name(each) or "").casefold()):
            return each, _read(known[each])
    if meant in published_models():
        return str(_folder_of(meant)), _text(dict(published_models()[meant]))
    names = sorted({*published_models(), *known})
    close = difflib.get_close_matches(name, names, 3, cutoff=0.4) or names[:3]
    raise OutsideTables(
        f"no kernels are known of a model {name!r}; give a folder with its config.json, or one of {len(names)} "
        f"names such as {', '.join(close)}"
    )


def _as_known(config: dict[str, Any]) -> dict[str, Any]:
    """Mistral without a window computes as Llama does; the package knows that one by name."""
    if config.get("architectures") == ["MistralForCausalLM"] and not config.get("sliding_window"):
        return {**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return config


@cache
def _folder_of(shape: str | Path) -> Path:
    """A folder with the config.json of a bundled shape, or that file, as the package can read it. It stays as long as
    this process lives."""
    config = _read(shape) if isinstance(shape, Path) else dict(published_models()[shape])
    made = Path(tempfile.mkdtemp(prefix="sojourn-shape-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    (made / "config.json").write_text(json.dumps(_as_known(config)))
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        return _text(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise OutsideTables(f"{path} cannot be read: {error}") from None


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **config.get("text_config", {})}


def _check(deployment: Deployment) -> None:
    measured = [name for name in catalogue() if name not in UNMEASURED]
    if deployment.device not in measured:
        raise OutsideTables(f"no kernels are measured on {deployment.device!r}; measured are {', '.join(measured)}")
    per_node = min(MOST_DEVICES, catalogue()[deployment.device].devices_per_node)
    if not 1 <= deployment.tensor_parallel <= per_node:
        raise OutsideTables(
            f"tensor parallelism {deployment.tensor_parallel} on {deployment.device} is outside of the tables: "
            f"they have 1 to {per_node}"
        )
    if deployment.tensor_parallel % deployment.expert_parallel:
        raise OutsideTables(
            f"expert parallelism {deployment.expert_parallel} does not divide the {deployment.tensor_parallel} devices"
        )
    if deployment.kv_format not in KV_MODES:
        raise OutsideTables(f"keys and values of {deployment.kv_format} are not measured; {', '.join(KV_MODES)} are")


def _compiled(deployment: Deployment, model: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The modes that the tables have for this format, and the handle. Raises OutsideTables."""
    weights = deployment.weight_format
    if weights == "fp8" and "weight_block_size" in (config.get("quantization_config") or {}):
        weights = "fp8_block"  # the checkpoint has no other
    has_experts = any(config.get(name) for name in EXPERTS)
    trials = (*MODES.get(weights, ()), *(EXPERT_MODES.get(weights, ()) if has_experts else ()))
    if not trials:
        raise OutsideTables(
            f"weights of {weights} are not measured for {deployment.model}; measured are {', '.join(MODES)}"
        )
    reasons = []
    for gemm, moe in trials:
        for attention in (None, "bfloat16"):
            modes = {
                "tp_size": deployment.tensor_parallel,
                "moe_tp_size": deployment.tensor_parallel // deployment.expert_parallel,
                "moe_ep_size": deployment.expert_parallel,
                "gemm_quant_mode": gemm, "moe_quant_mode": moe, "fmha_quant_mode": attention,
                "kvcache_quant_mode": KV_MODES[deployment.kv_format],
            }  # fmt: skip
            try:
                return modes, _tried(deployment, model, modes)
            except OutsideTables as refused:
                reasons.append(str(refused))
    raise OutsideTables(
        f"{deployment.model} in {deployment.weight_format} on {deployment.tensor_parallel} x {deployment.device} with "
        f"{deployment.backend} is outside of the tables: {reasons[0]}"
    )


def _tried(deployment: Deployment, model: str, modes: Mapping[str, Any]) -> Any:
    """A handle that answers from measurements alone. Raises OutsideTables."""

    def asked() -> Any:
        from aiconfigurator_core.sdk.engine import EngineHandle

        handle = EngineHandle.compile(model, deployment.device, deployment.backend, **modes)
        for ask in (lambda: handle.decode_step_latency(4, 512, 2), lambda: handle.mixed_step_breakdown(256, 4, 512, 2)):
            ask()
            if (guessed := handle.last_provenance()) is not None:
                raise OutsideTables(f"part of its times is guessed ({guessed})")
        return handle

    return _quietly(asked)


def _kv_tokens(deployment: Deployment, model: str, modes: Mapping[str, Any]) -> int:
    """Of one replica. Raises OutsideTables where the weights leave none."""
    serving = SERVING[deployment.backend]

    def asked() -> dict[str, Any]:
        from aiconfigurator_core.sdk.memory import estimate_kv_cache

        return estimate_kv_cache(
            model, deployment.device, deployment.backend, "current", max_num_tokens=serving.step_tokens,
            max_batch_size=serving.sequences,
            memory_fraction_kind="of_free" if serving.fraction_is_of_free else "of_total",
            memory_fraction_value=serving.memory_fraction, **modes,
        )  # fmt: skip

    try:
        return int(_quietly(asked)["total_kv_size_tokens"])
    except OutsideTables as refused:
        if "no KV budget" not in str(refused):
            raise
        d = deployment
        raise OutsideTables(
            f"{d.model} in {d.weight_format} leaves no memory for keys and values on {d.tensor_parallel} x {d.device}; "
            "take more devices, larger ones or a narrower format"
        ) from None


def _quietly(asked: Callable[[], Any]) -> Any:
    """The package warns of each table that it loads, and has an exception for every case."""
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    try:
        return asked()
    except OutsideTables:
        raise
    except Exception as error:
        text = str(error).partition(" at /")[0].partition(" Supported")[0].strip(" .") or type(error).__name__
        raise OutsideTables(text) from None
