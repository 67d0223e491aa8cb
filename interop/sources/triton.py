"""Triton: families `nv_*` of its core (2.0 to 2.60) and of its TensorRT-LLM backend.

What to know of its figures. Times are counted in microseconds, and a request is counted by each model that it passes:
of an ensemble and its parts only the whole is read (`ensemble`, `tensorrt_llm_bls`). The core's queue is in front of a
backend; the line of the TensorRT-LLM executor is a gauge of its own. Triton counts no tokens, and the histogram of
first responses takes `--metrics-config histogram_latencies=true`. The vLLM backend shows vLLM's own names beside these:
then they are read.
"""

from sojourn.interop.sources.source import (
    Latency,
    Source,
    Span,
    Term,
    Translation,
    partly,
    unseen,
)

REQUESTS, BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
MICROSECOND, MILLISECOND = 1e-6, 1e-3
ENDED = (Term("nv_inference_request_success"),)
E2E, QUEUE, COMPUTE = (
    (Term(f"nv_inference_{name}_duration_us", scale=MICROSECOND),) for name in ("request", "queue", "compute_infer")
)
IN_COMPUTE = "its time lies inside Triton's compute time, which does not tell it apart"
OF_BACKEND = ("memory.blocked", "compute.prefill", "compute.decode", "request.interference", "compute.host",
              "token.sample")  # fmt: skip

TRITON = Source(
    key="triton",
    title="Triton",
    version="2.60",
    prefix="nv_inference_",
    oldest="2.0",
    translations=(
        Translation(
            "sojourn_request_running", ((Term(REQUESTS, (("request_type", "scheduled"),)),),),
            differs="of the TensorRT-LLM backend; other backends do not show it",
        ),
        Translation(
            "sojourn_request_waiting",
            (
                (Term(REQUESTS, (("request_type", "active"),)),
                 Term(REQUESTS, (("request_type", "scheduled"),), sign=-1)),
                (Term("nv_inference_pending_request_count"),),
            ),
            versions=("with the TensorRT-LLM backend", "2.43 – with other backends"),
            differs="of the TensorRT-LLM backend its active requests that no step holds; of others those in front of "
            "the backend, which may queue more",
        ),
        Translation(
            "sojourn_memory_kv_usage_ratio", ((Term(BLOCKS, (("kv_cache_block_type", "fraction"),)),),), largest=True,
            differs="of the TensorRT-LLM backend",
        ),
        Translation(
            "sojourn_request_finished_total", (ENDED,),
            differs="without those that failed; of an ensemble the whole, not its parts",
        ),
        Translation(
            "sojourn_request_ttft_seconds",
            ((Term("nv_inference_first_response_histogram_ms", scale=MILLISECOND),),),
            differs="to the first response of a decoupled model, which is the whole answer where nothing is streamed",
        ),
    ),
    spans=(
        Span("front", ("request.admission",), QUEUE, ENDED, QUEUE, ENDED, "in Triton's line in front of the backend"),
        Span("compute", OF_BACKEND, COMPUTE, ENDED, (), (), "in the backend, whose own line is part of it"),
    ),
    latency=Latency(E2E, ENDED, ("client.network", "request.stream")),
    sights={
        "request.admission": partly("the mean of queue_duration: the line in front of the backend"),
        "request.queue": unseen("the backend's own line is a gauge; its time lies inside compute_infer_duration"),
        "compute.prefill": partly("inside compute_infer_duration"),
        "compute.decode": partly("inside compute_infer_duration"),
        "memory.blocked": unseen(IN_COMPUTE),
        **{name: unseen(IN_COMPUTE) for name in ("request.interference", "compute.host", "token.sample")},
    },
    settings={
        "batch cap": "max_batch_size, dynamic_batching",
        "KV block pool": "kv_cache_free_gpu_mem_fraction",
        "prefix cache": "enable_kv_cache_reuse",
    },
    own_labels=("model", "version", "request_type", "kv_cache_block_type", "general_type", "gpu_uuid", "reason"),
    steps=("nv_trt_llm_general_metrics", "nv_inference_exec_count"),
    wholes=("ensemble", "tensorrt_llm_bls"),
    whole_label="model",
)  # fmt: skip
