"""Every setting of the engine, its default and its bounds, once. The command line and `docs` are made from this."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from sojourn.engine.request.policies import POLICIES
from sojourn.engine.settings.eviction import EvictionSettings
from sojourn.engine.settings.fleet import FleetSettings
from sojourn.engine.settings.group import ParallelSettings
from sojourn.engine.settings.handover import KVTransferSettings
from sojourn.engine.settings.kv_cache import KVCacheSettings
from sojourn.engine.settings.lora import LoraSettings
from sojourn.engine.settings.models import ModelsSettings
from sojourn.engine.settings.panels import COMPUTE, EXPERIMENTS, MEMORY, REQUEST, SERVER, TELEMETRY, TOKEN
from sojourn.engine.settings.quantisation import QuantisationSettings
from sojourn.engine.settings.speculation import PROPOSING, SpeculationSettings
from sojourn.engine.settings.tiers import KVTierSettings, has_tiers

_POLICY_OF = {policy.setting: name for name, policy in POLICIES.items() if policy.setting is not None}


class EngineConfig(
    ParallelSettings,  # first: its validators see the techniques of the others
    QuantisationSettings,
    SpeculationSettings,
    KVCacheSettings,
    EvictionSettings,
    KVTierSettings,
    KVTransferSettings,
    LoraSettings,
    FleetSettings,
    ModelsSettings,
):
    """Settings of one engine. Frozen; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field(description="folder of a Hugging Face checkpoint, or `tiny-model` for the bundled one")
    served_model_name: str | None = TOKEN(None, description="name that clients ask for; the folder's name by default")
    host: str = SERVER("127.0.0.1", description="address to listen on")
    port: int = SERVER(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: Literal["auto", "cpu", "cuda"] = COMPUTE("auto", description="auto takes CUDA where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = COMPUTE(
        "auto", description="auto is float32 on a CPU and bfloat16 on CUDA"
    )
    load_format: Literal["auto", "safetensors-stream", "safetensors-mmap", "dummy"] = TOKEN(
        "auto",
        description="how weights are read: auto streams safetensors into place and maps GGUF; safetensors-mmap maps "
        "files, which takes their size once more; dummy takes random weights, for which config.json is enough",
    )
    attention_backend: Literal["auto", "triton", "cpp", "torch"] = COMPUTE(
        "auto", description="kernels of attention; auto takes the fastest on the device, torch is the reference"
    )
    fused_operations: Literal["auto", "off"] = COMPUTE(
        "auto", description="norms, rotation with cache write, and gates as fused kernels where the device has them"
    )
    overlap: Literal["auto", "on", "off"] = COMPUTE(
        "auto", description="launch a step before the one before it is read; auto is on with CUDA and off on a CPU"
    )
    graphs: Literal["auto", "on", "off"] = COMPUTE(
        "auto", description="replay decode steps as CUDA graphs; auto goes on without where they cannot be captured"
    )
    threads: int = COMPUTE(
        0, ge=0, le=1024, description="CPU threads of the core process; 0 is one for each core it may use"
    )
    max_model_len: int | None = TOKEN(
        None, ge=2, description="prompt and output tokens of one request; the model's own limit by default"
    )
    block_size: int = MEMORY(16, ge=1, le=1024, description="tokens of one KV block")
    num_kv_blocks: int | None = MEMORY(
        None, ge=1, description="blocks of the KV pool; by default what all sequences can use, within memory_fraction"
    )
    kv_cache_gib: float | None = MEMORY(
        None, gt=0, le=1_048_576, description="GiB of the KV pool; in place of num_kv_blocks"
    )
    memory_fraction: float | None = MEMORY(
        None,
        gt=0,
        le=0.98,
        description="share that KV may take of the memory that is left by weights and work space; by default 0.85 of a "
        "GPU's, 0.25 of a host's",
    )
    max_num_seqs: int = REQUEST(64, ge=1, le=4096, description="requests that run at the same time")
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | Literal["auto"] = REQUEST(
        "auto",
        description="token budget of one step, such as 512; auto: as many as keep a step with prompts and decodes "
        "within 0.8 of objective_tpot_ms, or by default within 3 decode steps",
    )
    max_prefill_chunk_tokens: int | None = REQUEST(
        None, ge=1, description="prompt tokens of one request in one step; by default the whole budget"
    )
    max_waiting: int = REQUEST(256, ge=1, le=1_000_000, description="requests that may wait; more get 429")
    drain_seconds: float = SERVER(20, ge=0, le=3600, description="time that open requests get to end after SIGTERM")
    core_silence_seconds: float = SERVER(
        5, ge=2, le=3600, description="silence of the core, beyond its longest step, after which /ready says 503"
    )
    core_hung_seconds: float = SERVER(
        60, ge=2, le=86_400, description="silence of the core, beyond its longest step, after which it is replaced"
    )
    max_core_deaths: int = SERVER(
        5, ge=1, le=1000, description="deaths of the core within 60 s after which the server gives up and exits with 1"
    )
    spare_core: bool = SERVER(
        True, description="a second process with torch loaded waits, without device memory, to replace a core that dies"
    )
    max_body_bytes: int = SERVER(8_388_608, ge=1024, description="bytes of one request body; more get 413")
    access: Path | None = SERVER(None, description="YAML file of tenants and tiers: limits, priorities, models")
    api_keys: Path | None = SERVER(
        None, description="file of hashed API keys, by `sojourn server keys create`; each request then needs one"
    )
    open_health: bool = SERVER(
        True, description="with api_keys: /health, /ready and the /query of a prefill server need no key"
    )
    moderation: Path | None = SERVER(None, description="YAML file of content checks; by default nothing is checked")
    max_open_body_bytes: int = SERVER(
        268_435_456, ge=1024, description="bytes of all bodies that are read at one time; more get 503"
    )
    max_head_bytes: int = SERVER(65_536, ge=1024, le=1_048_576, description="bytes of a request's head; more get 431")
    max_header_fields: int = SERVER(128, ge=8, le=10_000, description="header fields of a request; more get 431")
    max_connections: int = SERVER(
        4096, ge=1, le=1_000_000, description="open connections; more close the one that idles longest, or get 503"
    )
    head_seconds: float = SERVER(10, gt=0, le=3600, description="time for a request's head to arrive, or 408")
    body_idle_seconds: float = SERVER(20, gt=0, le=3600, description="time between two parts of a body, or 408")
    body_seconds: float = SERVER(120, gt=0, le=86_400, description="time for a whole body to arrive, or 408")
    keep_alive_seconds: float = SERVER(
        75, gt=0, le=86_400, description="time until a connection without a request is closed"
    )
    send_seconds: float = SERVER(
        60, gt=0, le=86_400, description="time that a client may read nothing of an answer before its call is aborted"
    )
    allowed_hosts: str | None = SERVER(
        None,
        description="names, with commas between them, that the header Host may have; * allows all; by default loopback "
        "names on a loopback address, and all names on another",
    )
    allowed_origins: str | None = SERVER(
        None, description="origins, with commas, of web pages that may use this server (CORS); * allows all"
    )
    debug_routes: Literal["on", "off"] = SERVER(
        "on", description="off: no routes below /debug, which show requests and can profile the engine"
    )
    max_long_prefills: int | None = REQUEST(
        None, ge=1, le=4096, description="long prompts that are computed at the same time; others overtake the rest"
    )
    long_prefill_tokens: int | None = REQUEST(
        None,
        ge=1,
        validate_default=True,
        description="a prompt is long above this; needs max_long_prefills, and that needs it",
    )
    policy: Literal[*POLICIES] = REQUEST(
        "fcfs",
        description="which request is served next, which is preempted, and whether prompts and decodes share a step",
    )
    priority_ageing: int | None = REQUEST(
        None,
        ge=1,
        le=1_000_000,
        description="policy priority: later arrivals that outweigh one level of priority; by default 256",
    )
    shortest_ageing: int | None = REQUEST(
        None,
        ge=1,
        le=1_000_000,
        description="policy shortest-prefill-first: tokens that each later arrival ranks behind; by default 4",
    )
    fair_output_weight: int | None = REQUEST(
        None,
        ge=1,
        le=1000,
        description="policy fair-share: prompt tokens that one output token counts for; by default 2",
    )
    prefill_patience: int | None = REQUEST(
        None,
        ge=1,
        le=1_000_000,
        description="policy prefill-first: steps of prompts before decodes get one; by default 64",
    )
    tool_format: Literal["hermes", "llama3", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31"] | None = TOKEN(
        None, description="how the model writes calls of tools; by default as its chat template shows them"
    )
    reasoning_format: Literal["none", "think", "deepseek_r1", "seed", "kimi", "magistral", "granite"] | None = TOKEN(
        None, description="how the model marks its reasoning; none: as text; by default as its chat template shows it"
    )
    generation_config: Literal["auto", "none"] = TOKEN(
        "auto", description="sampling of requests that do not say: auto takes the checkpoint's, as vLLM; none: neutral"
    )
    prefix_caching: bool = MEMORY(True, description="reuse the KV of prompts that begin alike")
    telemetry: Literal["full", "off"] = TELEMETRY(
        "full", description="off: no ledgers, no records of steps and requests, no overhead"
    )
    seed: int = TOKEN(0, ge=0, lt=2**63, description="seed of requests that bring none")
    objective_ttft_ms: float | None = TELEMETRY(
        None, gt=0, description="count requests that meet this time to first token"
    )
    objective_tpot_ms: float | None = TELEMETRY(None, gt=0, description="... this time per output token")
    objective_e2e_ms: float | None = TELEMETRY(None, gt=0, description="... this time to the last byte")
    run_dir: Path | None = TELEMETRY(None, description="folder to record requests, steps and system into")
    usage_dir: Path | None = TELEMETRY(
        None, description="folder to append a usage record of every call to, for bills; several servers may share it"
    )
    usage_prices: Path | None = TELEMETRY(
        None, description="price list (YAML), with which each usage record is priced; by default records have no price"
    )
    usage_file_bytes: int | None = TELEMETRY(
        None,
        ge=4096,
        description="size at which another usage file begins, as on each day; by default 67,108,864",
    )
    usage_sync_seconds: float | None = TELEMETRY(
        None,
        ge=0,
        le=3600,
        description="usage records that a power failure may lose, in seconds; 0 syncs each line first; by default 1",
    )
    compat: Literal["none", "vllm"] = TELEMETRY(
        "none",
        description="vllm adds the names of vLLM to /metrics, for its dashboards, KEDA rules and endpoint pickers",
    )
    otlp_endpoint: str | None = TELEMETRY(
        None, description="base address of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318"
    )
    trace_sample_ratio: float | None = TELEMETRY(
        None,
        ge=0,
        le=1,
        description="share of traces sent there, by trace id; missed objectives and errors always are; by default 1",
    )
    otlp_metrics: bool | None = TELEMETRY(
        None, description="send the histograms gen_ai.server.* to the collector, too, every 10 s; by default yes"
    )

    faults: str | None = EXPERIMENTS(
        None, description="faults to plant on purpose, such as slow_tokeniser:ms=20; docs/faults.md lists them"
    )

    @field_validator("core_hung_seconds")
    @classmethod
    def _hung_after_silent(cls, hung: float, info: ValidationInfo) -> float:
        silence = info.data.get("core_silence_seconds", hung)
        if hung < silence:
            raise ValueError(f"it is below core_silence_seconds={silence:g}; raise it")
        return hung

    @field_validator("max_prefill_chunk_tokens")
    @classmethod
    def _chunk_fits_in_a_step(cls, chunk: int | None, info: ValidationInfo) -> int | None:
        budget = info.data.get("max_num_batched_tokens")
        if chunk is not None and isinstance(budget, int) and chunk > budget:
            raise ValueError(f"a step has only max_num_batched_tokens={budget}; raise that, or lower this")
        return chunk

    @field_validator("long_prefill_tokens")
    @classmethod
    def _cap_and_length_together(cls, length: int | None, info: ValidationInfo) -> int | None:
        cap = info.data.get("max_long_prefills")
        if (cap is None) != (length is None) and "max_long_prefills" in info.data:
            raise ValueError("max_long_prefills and long_prefill_tokens go together; set both or neither")
        if cap is not None and cap > info.data.get("max_num_seqs", cap):
            raise ValueError(f"max_long_prefills={cap} is above max_num_seqs={info.data['max_num_seqs']}; lower it")
        return length

    @field_validator("kv_cache_gib", "memory_fraction")
    @classmethod
    def _one_size_of_the_pool(cls, value: float | None, info: ValidationInfo) -> float | None:
        others = [name for name in ("num_kv_blocks", "kv_cache_gib") if info.data.get(name) is not None]
        if value is not None and others:
            raise ValueError(f"{others[0]} says how large the KV pool is; leave one of the two out")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", endpoint):
            raise ValueError("give the collector's address, such as http://127.0.0.1:4318")
        return endpoint

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: str | None) -> str | None:
        for origin in listed(origins):
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#]+", origin):
                raise ValueError(f"{origin!r} is no origin; give scheme, name and port, such as http://localhost:3000")
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, hosts: str | None) -> str | None:
        for host in listed(hosts):
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", host):
                raise ValueError(f"{host!r} is no host name; give it without scheme and port, such as llm.example")
        return hosts

    @field_validator("trace_sample_ratio", "otlp_metrics")
    @classmethod
    def _belongs_to_a_collector(cls, value: float | bool | None, info: ValidationInfo) -> float | bool | None:
        if value is not None and info.data.get("otlp_endpoint", "") is None:
            raise ValueError("nothing is sent, as otlp_endpoint is not set; set it, or leave this out")
        return value

    @field_validator("usage_prices", "usage_file_bytes", "usage_sync_seconds")
    @classmethod
    def _belongs_to_usage(cls, value: Path | float | None, info: ValidationInfo) -> Path | float | None:
        if value is not None and info.data.get("usage_dir", "") is None:
            raise ValueError("no usage is recorded, as usage_dir is not set; set it, or leave this out")
        return value

    @field_validator("run_dir", "objective_ttft_ms", "objective_tpot_ms", "objective_e2e_ms", "compat", "otlp_endpoint")
    @classmethod
    def _needs_records(cls, value: Path | float | str | None, info: ValidationInfo) -> Path | float | str | None:
        if value not in (None, "none") and info.data.get("telemetry") == "off":
            raise ValueError("telemetry=off leaves no records to make it from; leave one of the two out")
        return value

    @field_validator("faults")
    @classmethod
    def _are_faults(cls, faults: str | None) -> str | None:
        if faults is not None:
            from sojourn.engine.faults.plan import planned  # only now: a server without faults has no code of theirs

            planned(faults)
        return faults

    @field_validator(*_POLICY_OF)
    @classmethod
    def _belongs_to_the_policy(cls, value: int | None, info: ValidationInfo) -> int | None:
        policy = _POLICY_OF[info.field_name]
        if value is not None and info.data.get("policy", policy) != policy:
            raise ValueError(f"only policy={policy} uses it, and policy is {info.data['policy']}; leave it out")
        return value


BUNDLED = (
    "tiny-model", "tiny-draft", "tiny-medusa", "tiny-eagle3",  # the last three draft for the first
    "tiny-mixture",  # a shape, for load_format=dummy
)  # fmt: skip
AUTO_STEP_TOKENS = {"cpu": 512, "cuda": 2048}  # with more rows the matrix products hardly get more efficient


def largest_chunk_tokens(config: EngineConfig, most_tokens: int) -> int:
    """Tokens of one request in a step of `most_tokens`."""
    return min(config.max_prefill_chunk_tokens or most_tokens, most_tokens)


def keeps_all_blocks(config: EngineConfig) -> bool:
    """Whether requests keep the blocks behind their window: a drafter has keys and values of its own in them, or KV
    tiers restore whole prefixes."""
    writes_ahead = config.speculation != "none" and PROPOSING[config.speculation].writes_ahead
    return writes_ahead or has_tiers(dict(config))


def largest_step_tokens(config: EngineConfig, device_type: str) -> int:
    """Tokens of the largest step on a device, `cpu` or `cuda`. Memory and time limits are planned for it."""
    if config.max_num_batched_tokens != "auto":
        return config.max_num_batched_tokens
    return max(AUTO_STEP_TOKENS[device_type], 2 * config.max_num_seqs)


def listed(setting: str | None) -> list[str]:
    """The parts of a setting that has commas between them."""
    return [part.strip() for part in (setting or "").split(",") if part.strip()]


def complaint(invalid: ValidationError) -> str:
    """What is wrong with the first bad setting, as a sentence."""
    first = invalid.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, EngineConfig.model_fields, n=1)
        hint = f"did you mean {close[0]}?" if close else "`sojourn serve --help` lists all"
        return f"{name} is not a setting of the engine; {hint}"
    reason = first["msg"].removeprefix("Value error, ")
    value = str(first["input"]) if isinstance(first["input"], Path) else first["input"]
    return f"{name}={value!r} is not valid: {reason[0].lower()}{reason[1:]}"


def model_folder(model: str) -> Path:
    """The folder that a setting names for a checkpoint, or by the name of a bundled one."""
    folder = Path(model).expanduser()
    if model in BUNDLED and not folder.is_dir():
        return Path(__file__).parent.parent / "scenarios" / model
    return folder


def objectives(config: EngineConfig) -> dict[str, float]:
    """The latency objectives that were set, in milliseconds by name."""
    bounds = {name: getattr(config, f"objective_{name}") for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    return {name: bound for name, bound in bounds.items() if bound is not None}
