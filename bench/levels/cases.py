"""Planted faults, public reports and healthy controls: what is planted, and the causes that count as right."""

from dataclasses import dataclass
from typing import Any

from bench.levels.plants import Beside, Plant, Proxy, Signals
from sojourn.loadgen.faults.planted import Network, NoisyNeighbour, StarvedLoadGenerator, SurroundingFault

LOAD_S = 45.0
SLO = {"ttft_ms": 500.0, "tpot_ms": 50.0}  # bounds of vLLM's histograms


def _class(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    return {"klass": "chat", "prompt_tokens": prompt, "output_tokens": output, "ignore_eos": True} | more


CHAT = _class(300, 40)
LONG = _class(100, 230)  # answers
SHARED = _class(1000, 24, shared_prefix_tokens=896, num_shared_prefixes=2)
DOCUMENT = _class(1900, 8, klass="document")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    what: str  # is planted, in words
    keys: tuple[str, ...] = ()  # of causes that are right, the first in the tables; none for a control
    flags: tuple[str, ...] = ()
    rate_rps: float = 2.0
    classes: tuple[dict[str, Any], ...] = (CHAT,)
    before: tuple[dict[str, Any], ...] = ()  # another load for the first half, which is in no client's run
    plants: tuple[Plant, ...] = ()
    around: tuple[SurroundingFault, ...] = ()
    load_s: float = LOAD_S
    timeout_s: float = 60.0
    report: str = ""  # the public report that the case rebuilds

    @property
    def is_control(self) -> bool:
        return not self.keys


CAP_2, CAP_4 = ("--max-num-seqs", "2"), ("--max-num-seqs", "4")
TINY_KV, SMALL_KV = ("--num-gpu-blocks-override", "20"), ("--num-gpu-blocks-override", "40")
LARGE_BLOCKS = ("--block-size", "512")
NO_CACHE = ("--no-enable-prefix-caching",)
SMALL_BUDGET = ("--max-num-batched-tokens", "16", "--max-num-seqs", "16")
DRAFTS = ("--speculative-config",
          '{"method":"ngram","num_speculative_tokens":8,"prompt_lookup_max":2,"prompt_lookup_min":1}')  # fmt: skip
HUNG = ("engine_stall",)
OVERLOADED = ("overload",)
FULL_BATCH = ("overload", "batch_cap")  # a line before a full batch is at its cap: whether a larger one gains is open
PROMPTS = ("token_budget_large", "head_of_line", "prefill_chunk")

CASES = (
    Case("idle", "no request", rate_rps=0.0),
    Case("light", "1 request/s", rate_rps=1.0),
    Case("load-30", "about 30% load", rate_rps=2.5),
    Case("load-60", "about 60% load", rate_rps=5.0),
    Case("load-80", "about 80% load", rate_rps=6.5),
    Case("prefixes", "shared prefixes, cached", classes=(SHARED,), rate_rps=2.0),
    Case("mixed-lengths", "prompts of 40 to 400 tokens", rate_rps=2.0, classes=(_class(
        {"distribution": "uniform", "min_tokens": 40, "max_tokens": 400},
        {"distribution": "uniform", "min_tokens": 10, "max_tokens": 90}),)),
    Case("long-answers", "answers of 230 tokens", rate_rps=0.7, classes=(LONG,)),
    Case("overload", "14 requests/s", FULL_BATCH, rate_rps=14.0, timeout_s=120.0),
    Case("overload-2", "24 requests/s", FULL_BATCH, rate_rps=24.0, load_s=30.0, timeout_s=120.0),
    Case("overload-prompts", "prompts of 1,200 tokens at 6/s", OVERLOADED, rate_rps=6.0,
         classes=(_class(1200, 24),), load_s=30.0, timeout_s=120.0),
    Case("hung", "the engine's process is stopped 15 s into the load", HUNG, timeout_s=40.0,
         plants=(Signals("stop", 15.0),), report="vllm#40926"),
    Case("after-hung", "the engine's process stood for 20 s, then went on", HUNG, timeout_s=60.0,
         plants=(Signals("stop", 8.0, 20.0),)),
    Case("half-hung", "the engine's process stands for 2.5 s in each 6 s", HUNG,
         plants=(Signals("stop", 3.0, 2.5, 6.0),)),
    Case("slow-reader", "a third of the clients read 3 KiB/s", ("slow_reader", "slow_network", "slow_writer"),
         rate_rps=1.0, classes=(LONG,), around=(Network(fault="network", kib_per_s=3, share=0.34),)),
    Case("slow-network", "600 ms each way between client and server", ("slow_network",),
         around=(Network(fault="network", delay_ms=600),)),
    Case("buffered", "a proxy gives an answer at its end", ("buffered_stream",), rate_rps=1.0, classes=(LONG,),
         plants=(Proxy("buffer"),), report="litellm#26102"),
    Case("cut-streams", "a proxy ends each connection at an age of 4 s", ("cut_streams",), rate_rps=0.7,
         classes=(_class(100, {"distribution": "uniform", "min_tokens": 100, "max_tokens": 1500}),),
         plants=(Proxy("cut", 4.0),)),
    Case("n-logprobs", "one request in 6 s asks for 48 answers with 20 log-probabilities",
         ("slow_sampler", *FULL_BATCH, "tenant_share"), plants=(Beside("n-logprobs", 5.0, 6.0),), report="vllm#37343"),
    Case("grammar", "a new JSON schema each 2 s", ("slow_grammar", "slow_sampler"),
         plants=(Beside("grammar", 5.0, 2.0),), report="vllm#12122"),
    Case("blocked-front", "the API server's process stands for 1.2 s in each 3 s",
         ("blocked_front", "slow_front"), plants=(Signals("stop", 3.0, 1.2, 3.0, process="APIServer"),)),
    Case("neighbour", "six processes compute beside the server", ("noisy_neighbour", "slow_device"), rate_rps=3.0,
         around=(NoisyNeighbour(fault="noisy_neighbour", processes=6),)),
    Case("starved-client", "the load generator stands for 700 ms in each 1.5 s", ("starved_load_generator",),
         around=(StarvedLoadGenerator(fault="starved_load_generator", pause_ms=700, every_ms=1500),),
         report="vllm#39963"),
    Case("long-prompts", "prompts of 1,900 tokens beside chat", PROMPTS, rate_rps=3.6,
         classes=(CHAT | {"weight": 5}, DOCUMENT | {"weight": 1}), report="qwen3.8-Flash-DGX#9"),
    Case("hits-fell", "shared prefixes at first, then prompts of the same length without", (
        "cache_thrash", "prefix_order", "own_prefill", "cache_pollution"), rate_rps=3.0, before=(SHARED,),
        classes=(_class(1000, 24),), load_s=30.0),
    Case("below-a-block", "prefixes of 480 tokens, in blocks of 512", ("prefix_sub_block",), flags=LARGE_BLOCKS,
         rate_rps=6.0, classes=(_class(500, 12, shared_prefix_tokens=480, num_shared_prefixes=1),),
         report="vllm#42317"),
    Case("killed", "the engine's process is killed", ("core_death",), plants=(Signals("kill", 20.0),),
         load_s=30.0, timeout_s=30.0),
    Case("batch-cap", "--max-num-seqs 2", ("batch_cap",), flags=CAP_2, rate_rps=7.0, timeout_s=120.0,
         report="vllm#14022"),
    Case("batch-cap-4", "--max-num-seqs 4", ("batch_cap",), flags=CAP_4, rate_rps=9.0, timeout_s=120.0),
    Case("hung-full-batch", "the engine's process is stopped with a full batch and a line", HUNG,
         flags=CAP_4, rate_rps=9.0, timeout_s=40.0, plants=(Signals("stop", 12.0),), load_s=35.0),
    Case("tiny-kv", "20 KV blocks", ("kv_pool",), flags=TINY_KV, rate_rps=4.0, classes=(_class(150, 230),),
         timeout_s=120.0, report="vllm#18115"),
    Case("thrash", "12 prefixes of 896 tokens in 40 blocks", ("cache_thrash", "kv_pool"), flags=SMALL_KV, rate_rps=4.0,
         classes=(SHARED | {"num_shared_prefixes": 12},), timeout_s=120.0),
    Case("prefix-cache-off", "--no-enable-prefix-caching", ("prefix_cache_off",), flags=NO_CACHE, rate_rps=3.0,
         classes=(SHARED,), timeout_s=120.0, report="home-ops#13384"),
    Case("small-budget", "--max-num-batched-tokens 16", ("token_budget",), flags=SMALL_BUDGET, rate_rps=1.8,
         classes=(_class(800, 24),), timeout_s=120.0),
    Case("rejected-drafts", "n-gram drafts that are rejected", ("rejected_drafts",), flags=DRAFTS, rate_rps=5.0,
         report="vllm#8439", timeout_s=120.0),
)  # fmt: skip
