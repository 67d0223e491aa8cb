"""llama.cpp's server: names of `tools/server` in 2026 (`--metrics`), and of older versions where they changed.

What to know of its figures. It counts tokens and seconds of prompts and of generation when a request's phase ends, and
no requests: a mean over requests cannot be made. A slot is a place in the batch, `requests_deferred` the line in front
of them. `prompt_tokens_total` leaves out what its cache had. Gauges that end in `_seconds` are rates since the start,
and are left out. A router of several models answers only with `?model=`.
"""

from sojourn.interop.sources.source import Latency, Source, Term, Translation, renamed, unseen

NO_REQUESTS = "llama.cpp counts tokens and seconds of all requests together, and no requests"
ACCOUNTS = ("request.queue", "memory.blocked", "compute.prefill", "compute.decode", "request.interference")

LLAMA_CPP = Source(
    key="llama.cpp",
    title="llama.cpp",
    version="b6000 – b9000",
    prefix="llamacpp:",
    oldest="b3000",
    translations=(
        renamed("sojourn_request_running", "llamacpp:requests_processing", differs="slots that compute a request"),
        renamed("sojourn_request_waiting", "llamacpp:requests_deferred", differs="requests without a slot"),
        renamed(
            "sojourn_memory_kv_usage_ratio",
            "llamacpp:kv_cache_usage_ratio",
            differs="gone since 2025: newer versions do not show the use of the KV cache",
        ),
        renamed(
            "sojourn_token_prompt_tokens_total",
            "llamacpp:prompt_tokens_total",
            differs="computed ones: what the cache had is not in it",
        ),
        renamed(
            "sojourn_token_generated_tokens_total",
            "llamacpp:tokens_predicted_total",
            differs="booked when the request ends",
        ),
        renamed("sojourn_token_drafted_tokens_total", "llamacpp:spec_decode_num_draft_tokens_total"),
        renamed("sojourn_token_accepted_tokens_total", "llamacpp:spec_decode_num_accepted_tokens_total"),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            ((Term("llamacpp:prompt_tokens_cached_total"),),),
            labels=(("result", "hit"),),
        ),
        Translation(
            "sojourn_memory_prefix_tokens_total",
            ((Term("llamacpp:prompt_tokens_total"),),),
            labels=(("result", "miss"),),
        ),
    ),
    spans=(),
    latency=Latency((), (), ("client.network", "token.decode", "request.stream")),
    sights={account: unseen(NO_REQUESTS) for account in ACCOUNTS},
    settings={
        "batch cap": "--parallel",
        "token budget": "--batch-size, --ubatch-size",
        "KV block pool": "--ctx-size, --cache-type-k, --cache-type-v",
        "prefix cache": "--cache-prompt, --cache-reuse",
    },
    steps=("llamacpp:n_decode_total",),
    ratios={
        "prefill_tokens_per_s": ((Term("llamacpp:prompt_tokens_total"),), (Term("llamacpp:prompt_seconds_total"),)),
        "decode_tokens_per_s_of_a_slot": (
            (Term("llamacpp:tokens_predicted_total"),),
            (Term("llamacpp:tokens_predicted_seconds_total"),),
        ),
    },
)
