"""vLLM's families that others read, and their types as prometheus_client's parser names them."""

# What the three dashboards that vLLM ships query.
DASHBOARDS = {
    "e2e_request_latency_seconds": "histogram", "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram", "request_time_per_output_token_seconds": "histogram",
    "request_queue_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram", "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram", "request_max_num_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram", "prompt_tokens": "counter", "generation_tokens": "counter",
    "request_success": "counter", "num_requests_running": "gauge", "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
}  # fmt: skip
OTHERS = {
    "cache_config_info": "gauge", "prefix_cache_queries": "counter", "prefix_cache_hits": "counter",
    "num_preemptions": "counter", "request_num_preemptions": "histogram", "lora_requests_info": "gauge",
    "spec_decode_num_drafts": "counter", "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter", "spec_decode_num_accepted_tokens_per_pos": "counter",
    "request_inference_time_seconds": "histogram", "prompt_tokens_by_source": "counter",
    "kv_block_lifetime_seconds": "histogram", "kv_block_idle_before_evict_seconds": "histogram",
    "kv_block_reuse_gap_seconds": "histogram", "estimated_flops_per_gpu": "counter",
    "estimated_read_bytes_per_gpu": "counter", "estimated_write_bytes_per_gpu": "counter",
}  # fmt: skip
