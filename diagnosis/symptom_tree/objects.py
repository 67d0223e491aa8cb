"""The objects at the leaves of a symptom tree: one for each cause that a diagnosis can name, under the cause's key.

The key ties a leaf to a finding. A cause that has no leaf here gets one from its finding, so none is ever missing.
"""

from dataclasses import dataclass

from sojourn.diagnosis.rules.cause import CONTENTION, WAITS
from sojourn.diagnosis.symptom_tree import compute_readings as compute
from sojourn.diagnosis.symptom_tree import memory_readings as memory
from sojourn.diagnosis.symptom_tree import request_readings as request
from sojourn.diagnosis.symptom_tree.reading import Read, account, prefix_outcome, waiting_for

PREFILL = ("compute.prefill", "request.interference")
DEVICE = ("compute.prefill", "compute.decode", "memory.recompute", *CONTENTION)
OUTCOMES = "what became of each prompt token in the prefix cache (requests: prefix_outcomes)"
FRONT = ("token.encode", "token.decode", "request.stream", "request.admission", "client.network")


@dataclass(frozen=True, slots=True)
class TreeObject:
    """A thing in a lifecycle that may delay requests, and how to tell."""

    key: str  # of the cause that names it
    lifecycle: str
    name: str
    asks: str  # the question of a newcomer
    measurement: str  # that separates it from what looks alike
    reads: tuple[Read, ...]
    accounts: tuple[str, ...] = ()  # where its time is booked; without any, accounts cannot rule it out
    lacks: str = ""  # the evidence that no run of ours has by itself
    evidence: str = "the server's records of its steps"  # what is missing where no figure can be read


_REQUEST = (
    TreeObject("overload", "request", "offered load", "Does more arrive than the device can serve?",
               "the same scenario at 70 % of the rate", (request.offered_load,), CONTENTION),
    TreeObject("burst", "request", "arrivals", "Do requests arrive in bursts?",
               "as many requests at a constant rate", (request.arrivals,), CONTENTION),
    TreeObject("batch_cap", "request", "batch cap (max_num_seqs)", "Do requests wait for a place in the batch?",
               "the same scenario with twice the max_num_seqs",
               (waiting_for("batch_cap", "a place in the batch"), compute.batch), WAITS),
    TreeObject("token_budget", "request", "token budget of a step, too small",
               "Do prompts wait because a step may hold too few tokens?",
               "the same scenario with twice the max_num_batched_tokens",
               (waiting_for("token_budget", "the token budget"),), (*CONTENTION, "compute.prefill")),
    TreeObject("token_budget_large", "request", "token budget of a step, too large",
               "Do long prompts of others fill the steps?", "the same scenario with half the max_num_batched_tokens",
               (account("request.interference"), request.mixed_step), CONTENTION),
    TreeObject("prefill_chunk", "request", "chunk limit of a prompt", "Is a prompt cut into too many chunks?",
               "the same scenario without max_prefill_chunk_tokens", (request.chunk_limit,),
               (*CONTENTION, "compute.prefill")),
    TreeObject("admission_policy", "request", "admission policy", "Does the policy hold requests back?",
               "the same scenario with policy=fcfs", (request.long_prefill_limit,), WAITS),
    TreeObject("scheduling_policy", "request", "scheduling order", "Are some requests served before others?",
               "the same scenario with policy=fcfs", (request.order,), CONTENTION),
    TreeObject("head_of_line", "request", "head of the queue", "Does one huge prompt hold all others up?",
               "the same scenario without its longest prompts", (request.longest_prompt,), CONTENTION),
    TreeObject("tenant_share", "request", "share of a tenant", "Does one tenant take the server?",
               "the same scenario with policy=fair-share", (request.tenants,), CONTENTION),
    TreeObject("queue_limit", "request", "queue limit (max_waiting)",
               "Does the server refuse requests at a full queue?",
               "the same scenario with twice the max_waiting", (request.refusals,)),
    TreeObject("rate_limit", "request", "rate limit of a tenant", "Does a tenant's limit hold requests?",
               "the same scenario without the tenant's limits", (account("request.quota"), ), ("request.quota",)),
    TreeObject("cold_model", "request", "model that is not loaded", "Do requests wait for their model?",
               "the same scenario with the model loaded before, and without models_gib and model_idle_seconds",
               (account("request.cold_start"), ), ("request.cold_start",)),
    TreeObject("slow_prefill_server", "request", "prefill server",
               "Do requests wait for a server that computes prompts?", "the same scenario with another prefill server",
               (account("request.remote_prefill"), ), ("request.remote_prefill",)),
    TreeObject("blocked_front", "request", "event loop of the front", "Does something block the front process?",
               "the loop lag of the front (sojourn_request_loop_lag_seconds) during the run",
               (request.front_blocked,), FRONT),
    TreeObject("slow_front", "request", "front process", "Is the front process too busy?",
               "the same scenario at half the rate, with the CPU use of the front in view",
               (request.front_busy,), FRONT),
    TreeObject("slow_writer", "request", "writes to the socket", "Does text wait to be written?",
               "one request alone, with request.stream of it", (account("request.stream"),), ("request.stream",)),
    TreeObject("slow_moderation", "request", "moderation", "Does the content check take long?",
               "the same scenario without moderation", (account("request.moderation"),), ("request.moderation",)),
    TreeObject("core_death", "request", "core process", "Did the server stop in between?",
               "the log of the server around the first failed request", (request.crashes, account("request.lost"))),
    TreeObject("replica_imbalance", "request", "choice of the router", "Has one server more requests than the others?",
               "the same scenario with a policy of the router that weighs load", (request.servers_unequal,), CONTENTION,
               evidence="several servers behind a router (requests: server)"),
    TreeObject("slow_router", "request", "router", "Does the way through the router take long?",
               "the same load sent to one of the servers, past the router", (account("request.routing"),),
               ("request.routing",)),
    TreeObject("broken_connections", "request", "connections", "Do connections end before the answer?",
               "a capture of the packets at the server's port", (request.crashes,)),
)  # fmt: skip
_MEMORY = (
    TreeObject("kv_pool", "memory", "KV block pool", "Do requests wait for KV blocks, or lose them?",
               "the same scenario with twice the num_kv_blocks", (memory.kv_pool,)),
    TreeObject("prefix_cache_off", "memory", "prefix cache, off", "Is the prefix cache off, though prompts repeat?",
               "the same scenario with prefix_caching=true", (memory.prefix_cache_is_on,), (*PREFILL, *WAITS)),
    TreeObject("cache_thrash", "memory", "prefix cache, too small", "Are prefixes evicted before they come again?",
               "the same scenario with twice the num_kv_blocks", (memory.evictions_hurt,), (*PREFILL, *WAITS),
               evidence=OUTCOMES),
    TreeObject("eviction_policy", "memory", "eviction of cached prefixes", "Are the wrong prefixes evicted?",
               "the same scenario with eviction_policy=lru", (memory.evictions_hurt,), (*PREFILL, *WAITS),
               evidence=OUTCOMES),
    TreeObject("cache_pollution", "memory", "prefix cache, polluted",
               "Do prompts of one use push the shared ones out?",
               "the same scenario without its prompts of one use", (memory.evictions_hurt,), (*PREFILL, *WAITS),
               evidence=OUTCOMES),
    TreeObject("prefix_order", "memory", "order inside the prompts",
               "Does a changing part stand before the shared one?",
               "sojourn lint of the run, or the same prompts with the shared part first",
               (memory.shared_part_comes_late,), (*PREFILL, *WAITS),
               evidence=OUTCOMES),
    TreeObject("prefix_sub_block", "memory", "block size against the prefix", "Is the shared prefix below one block?",
               "the same scenario with half the block_size",
               (prefix_outcome("miss_sub_block", what="lie in a shared part below one block"),), (*PREFILL, *WAITS),
               evidence=OUTCOMES),
    TreeObject("adapter_slots", "memory", "adapter slots", "Do requests wait for the slot of a LoRA adapter?",
               "the same scenario with as many max_loras as adapters", (), WAITS,
               evidence="waits for the reason adapter (requests: waits)"),
    TreeObject("slow_kv_tier", "memory", "KV tier", "Do reads of a KV tier take longer than to compute again?",
               "the same scenario without the tier", (account("memory.load"),), ("memory.load",),
               evidence="load_ns and recompute_predicted_ns of requests"),
    TreeObject("slow_kv_transfer", "memory", "KV transfer between servers",
               "Does KV of another server come late, though it is computed?",
               "the same scenario with one server that does both, or with another kv_transport",
               (account("memory.transfer"),), ("memory.transfer",),
               evidence="transfer_bytes and transfer_ns of requests"),
    TreeObject("cache_blind_routing", "memory", "choice of the router",
               "Are prompts sent to servers that do not hold their beginning?",
               "the same scenario with a policy of the router that looks at caches", (memory.lost_by_routing,),
               (*PREFILL, *WAITS), evidence="hashes of KV blocks of several servers (requests: prompt_block_hashes)"),
    TreeObject("fragmentation", "memory", "empty slots of blocks", "Are blocks so large that they stay half empty?",
               "the same scenario with half the block_size", (memory.half_blocks,)),
    TreeObject("block_leak", "memory", "blocks that nobody owns", "Do blocks stay taken after their request?",
               "KV blocks in use while no request is in the server", (memory.leaked_blocks,),
               evidence="the active blocks of steps, and when requests held some"),
)  # fmt: skip
_COMPUTE = (
    TreeObject("own_prefill", "compute", "the request's own prompt", "Does its own prompt take that long?",
               "one of these prompts alone", (account("compute.prefill"),), ("compute.prefill",)),
    TreeObject("slow_decode", "compute", "decode step", "Is a normal step longer than the objective?",
               "one request alone", (compute.decode_step,), ("compute.decode",)),
    TreeObject("slow_device", "compute", "device", "Is the device slower than its work explains?",
               "the same scenario on a quiet machine, with the device's clock in view", (compute.device_slowdown,),
               DEVICE),
    TreeObject("straggler", "compute", "one server of the fleet", "Is one server slower than the others?",
               "sojourn diagnose of the slow server's own run", (compute.slowest_server,), DEVICE,
               evidence="the steps of several servers"),
    TreeObject("noisy_neighbour", "compute", "other processes of the machine", "Does another process use the device?",
               "the CPU time of other processes during the run", (compute.neighbours,), DEVICE,
               evidence="the CPU use of other processes (system)"),
    TreeObject("slow_host", "compute", "host side of the loop", "Does the host keep the device waiting?",
               "a profile of the loop: py-spy on the core process", (compute.host_time,)),
    TreeObject("launch_bound", "compute", "kernel launches", "Do launches take longer than kernels?",
               "the same scenario with graphs", (compute.launches,)),
    TreeObject("batch_too_large", "compute", "batch size", "Is the batch so large that each step is late?",
               "the same scenario with half the max_num_seqs", (compute.large_batch,), ("compute.decode",)),
    TreeObject("slow_kernel", "compute", "kernels", "Are the kernels far from what the device can do?",
               "a profile burst (sojourn serve, POST /debug/profile) against the roofline", (), DEVICE,
               lacks="a profile burst of kernels"),
    TreeObject("slow_format", "compute", "format of weights or KV", "Is this format slower here than an exacter one?",
               "the same scenario with another format", (), DEVICE,
               lacks="the speed of another format on this machine"),
    TreeObject("rejected_drafts", "compute", "drafts of speculation", "Do drafts cost more than they save?",
               "the same scenario with speculation=none", (), ("compute.decode", "compute.draft"),
               evidence="drafted and accepted tokens of requests"),
    TreeObject("no_drafts", "compute", "steps of one token", "Does the output repeat what stands before it?",
               "the same scenario with speculation=ngram", (), ("compute.decode",),
               evidence="the steps that prompt lookup would have taken (requests: lookup_steps)"),
    TreeObject("few_threads", "compute", "threads of the core", "Are cores left unused?",
               "the same scenario with threads equal to the cores", (compute.threads,), DEVICE,
               evidence="the threads and the cores, in run.json"),
    TreeObject("needless_parallelism", "compute", "parallel group", "Do several ranks share what one device holds?",
               "the same scenario with one process", (compute.exchanges,), (*DEVICE, "compute.communication"),
               evidence="the time of each rank (steps: rank_*_ns)"),
    TreeObject("communication_overhead", "compute", "link between ranks", "Do ranks stand in exchanges?",
               "sojourn calibrate-device: the exchanges of two ranks alone", (compute.exchanges,),
               (*DEVICE, "compute.communication"), evidence="the time of each rank (steps: rank_*_ns)"),
    TreeObject("pipeline_bubbles", "compute", "pipeline stages", "Do stages wait for each other?",
               "the same scenario in one process", (compute.stage_waits,), (*DEVICE, "compute.bubble"),
               evidence="the time of each rank (steps: rank_*_ns)"),
    TreeObject("slow_rank", "compute", "one rank of the group", "Does one rank compute longer than the others?",
               "the same scenario with the devices of two ranks exchanged", (compute.slowest_rank,),
               (*DEVICE, "compute.communication", "compute.bubble"),
               evidence="the time of each rank (steps: rank_*_ns)"),
    TreeObject("expert_imbalance", "compute", "placement of experts", "Do tokens choose the experts of one rank?",
               "the same scenario with tensor_parallel in the place of expert_parallel", (compute.expert_ranks,),
               (*DEVICE, "compute.communication"), evidence="the tokens of each expert (steps: expert_tokens)"),
)  # fmt: skip
_TOKEN = (
    TreeObject("slow_tokeniser", "token", "tokeniser", "Does it take long to turn the prompt into ids?",
               "one of these prompts through POST /tokenize", (request.in_the_front("encode", "tokenisation"),), FRONT),
    TreeObject("slow_detokeniser", "token", "detokeniser", "Does it take long to turn ids into text?",
               "the same scenario with short answers", (request.in_the_front("decode", "ids → text"),), FRONT),
    TreeObject("slow_sampler", "token", "sampler", "Does the draw of a token take long?",
               "the same scenario with temperature=0 and no penalties", (account("token.sample"),), ("token.sample",)),
    TreeObject("long_outputs", "token", "length of the answers", "Are the answers longer than the objective allows?",
               "the same scenario with a smaller max_tokens", (request.output_lengths,)),
)  # fmt: skip
_CLIENT = (
    TreeObject("slow_network", "client", "network path", "Does the way between client and server take long?",
               "the same load from the server's own host", (account("client.network"),), ("client.network",)),
    TreeObject("slow_reader", "client", "reader", "Does the client read slowly?",
               "the same load with a client that discards what it reads",
               (account("client.network", "request.stream"),), ("client.network", "request.stream")),
    TreeObject("starved_load_generator", "client", "load generator", "Does the load generator send late?",
               "sojourn calibrate, then the same scenario on a quiet machine", (request.client_lag,),
               ("client.lag", "client.network")),
)  # fmt: skip
OBJECTS: dict[str, TreeObject] = {each.key: each for each in (*_REQUEST, *_MEMORY, *_COMPUTE, *_TOKEN, *_CLIENT)}
