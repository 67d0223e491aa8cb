"""The memory lifecycle's metrics: the state that persists between steps."""

from metrics.metric import LATENCY_BOUNDS, PROCESSES, counter, gauge, histogram

BLOCK_STATES = ("active", "pinned", "reusable", "free")  # as they are stacked: what is in use lies below

MEMORY = (
    gauge("memory", "kv_blocks", "blocks", "KV blocks by state; the states sum to the pool.",
          "As of the last step; a full block with one reader counts like one with many.", state=BLOCK_STATES),
    gauge("memory", "kv_usage_ratio", "ratio", "Share of KV blocks that live requests hold: active or pinned.",
          "Reusable blocks count as unused, since they can be evicted; empty slots inside blocks do not show."),
    counter("memory", "prefix_tokens_total", "tokens",
            "Prompt tokens of requests that ran, by whether the prefix cache had them: hit, miss.",
            "Does not tell why a token missed, nor what an infinite cache would have hit.", result=("hit", "miss")),
    counter("memory", "evicted_blocks_total", "blocks", "Reusable KV blocks given to someone else.",
            "Harmless unless somebody asks for the evicted prefix again."),
    counter("memory", "preemptions_total", "requests", "Times that a running request lost its KV blocks.",
            "Their cost is in the recomputed tokens and in sojourn_memory_preempted_seconds."),
    counter("memory", "recomputed_tokens_total", "tokens",
            "Tokens of ended requests whose KV was computed again after a preemption.",
            "Booked at the end of a request; live they are kind=\"recompute\" of the scheduled tokens."),
    histogram("memory", "blocked_seconds", "seconds", LATENCY_BOUNDS,
              "Time a request waited for KV blocks (account memory.blocked).",
              "Requests that still wait are not in it."),
    histogram("memory", "preempted_seconds", "seconds", LATENCY_BOUNDS,
              "Time from eviction to being scheduled again, of requests that were preempted.",
              "Rebuilding the KV comes on top: account memory.recompute of the ledger."),
    gauge("memory", "device_used_bytes", "bytes", "Memory of the GPU in use, by all processes.",
          "No series without a GPU's driver."),
    gauge("memory", "resident_bytes", "bytes", "Memory of the host that a process holds: front, core.",
          "Shared pages count in both.", process=PROCESSES),
)  # fmt: skip
