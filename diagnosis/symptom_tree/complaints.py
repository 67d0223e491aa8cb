"""The six complaints in the words of users, and the objects that can cause each. Pure data, and a search by words."""

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

from sojourn.diagnosis.symptoms import BY_KEY
from sojourn.metrics.errors import InputError

CLOSE_ENOUGH = 0.6  # of a word or a phrase: below it, difflib finds what nobody meant


@dataclass(frozen=True, slots=True)
class Complaint:
    """One of the six symptoms as a user says it. `objects`: keys of `objects.OBJECTS`, the most frequent first."""

    symptom: str  # key of symptoms.SYMPTOMS
    words: str
    aliases: tuple[str, ...]
    objects: tuple[str, ...]

    @property
    def title(self) -> str:
        return BY_KEY[self.symptom].title


_WAITING = ("overload", "burst", "batch_cap", "token_budget", "token_budget_large", "prefill_chunk", "admission_policy",
            "scheduling_policy", "head_of_line", "tenant_share", "rate_limit", "cold_model",
            "adapter_slots")  # fmt: skip
_FRONT = ("blocked_front", "slow_front", "slow_writer", "slow_moderation", "core_death", "broken_connections")
_PREFIX = ("prefix_cache_off", "cache_thrash", "eviction_policy", "cache_pollution", "prefix_order",
           "prefix_sub_block", "slow_kv_tier")  # fmt: skip
_SPLIT = ("slow_prefill_server", "slow_kv_transfer")
_GROUP = ("needless_parallelism", "communication_overhead", "pipeline_bubbles", "slow_rank", "expert_imbalance")
_FLEET = ("replica_imbalance", "straggler", "cache_blind_routing", "slow_router")
_DEVICE = (
    "slow_device",
    "noisy_neighbour",
    "slow_host",
    "launch_bound",
    "batch_too_large",
    "slow_kernel",
    "slow_format",
    "few_threads",
    *_GROUP,
)
_CLIENT = ("slow_network", "slow_reader", "starved_load_generator")

COMPLAINTS = (
    Complaint("high_ttft", "My first token is slow",
              ("ttft", "time to first token", "slow to start", "the answer begins late", "long wait before the answer",
               "slow first token", "queue"),
              (*_WAITING, "queue_limit", *_FRONT, "kv_pool", *_PREFIX, "fragmentation", "block_leak", "own_prefill",
               *_SPLIT, *_DEVICE, *_FLEET, "slow_tokeniser", "slow_detokeniser", "slow_sampler", *_CLIENT)),
    Complaint("high_itl", "The text stutters",
              ("itl", "tpot", "inter-token latency", "time per output token", "tokens come slowly", "slow stream",
               "pauses in the text", "stutter", "slow answer"),
              ("token_budget_large", "scheduling_policy", "head_of_line", "overload", *_FRONT, "kv_pool",
               "fragmentation", "block_leak", "slow_decode", "rejected_drafts", "no_drafts", *_DEVICE,
               "replica_imbalance", "straggler", "slow_detokeniser", "slow_sampler",
               "long_outputs", *_CLIENT)),
    Complaint("low_device_utilisation", "The GPU idles",
              ("low utilisation", "low utilization", "idle gpu", "device idles", "gpu not busy", "gpu usage is low",
               "cpu idles"),
              ("batch_cap", "admission_policy", "token_budget", "queue_limit", "rate_limit", "cold_model",
               "blocked_front", "slow_front", "kv_pool", "fragmentation", "block_leak", "slow_host", "launch_bound",
               "few_threads", "slow_tokeniser", "slow_detokeniser", "slow_sampler", "slow_network",
               "starved_load_generator")),
    Complaint("vram_fills_quickly", "Memory fills quickly",
              ("vram", "kv cache full", "out of memory", "preemptions", "memory full", "oom", "kv blocks"),
              ("kv_pool", "fragmentation", "block_leak", "cache_thrash", "cache_pollution", "prefix_cache_off",
               "overload", "burst", "head_of_line", "long_outputs")),
    Complaint("product_latency_poor", "Benchmark good, product slow",
              ("good benchmark, poor product latency", "slower in production", "benchmark good product slow",
               "production is slow"),
              ("burst", "token_budget_large", "head_of_line", "tenant_share", "rate_limit", "cold_model", "kv_pool",
               *_PREFIX, "long_outputs", "slow_tokeniser", *_CLIENT)),
    Complaint("devices_do_not_help", "More devices do not help",
              ("more gpus do not help", "no speedup", "does not scale", "scaling is poor", "more threads do not help"),
              ("batch_cap", "admission_policy", *_FRONT, "kv_pool", "slow_host", "launch_bound", "slow_kernel",
               "few_threads", *_GROUP, *_SPLIT, *_FLEET, "slow_tokeniser", "slow_detokeniser", "slow_sampler",
               *_CLIENT)),
)  # fmt: skip
BY_SYMPTOM = {complaint.symptom: complaint for complaint in COMPLAINTS}


def find_complaint(text: str) -> Complaint:
    """The complaint of a symptom's key, title or words, spelled nearly right. Raises InputError with all."""
    wanted = _plain(text)
    scores = {each.symptom: max(_likeness(wanted, phrase) for phrase in _phrases(each)) for each in COMPLAINTS}
    best, second = sorted(scores.values(), reverse=True)[:2]
    if not wanted or best < CLOSE_ENOUGH or best == second:
        known = "; ".join(f"{each.symptom} (“{each.words}”)" for each in COMPLAINTS)
        raise InputError(f"{text!r} names none of the six symptoms; choose one of: {known}")
    return BY_SYMPTOM[max(scores, key=scores.__getitem__)]


def _phrases(complaint: Complaint) -> tuple[str, ...]:
    return tuple(map(_plain, (complaint.symptom, complaint.words, complaint.title, *complaint.aliases)))


def _plain(text: str) -> str:
    """Lower case words without what carries no meaning."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return " ".join(word for word in words if word not in ("my", "the", "is", "a", "of", "do", "so", "very", "too"))


def _likeness(wanted: str, phrase: str) -> float:
    """0 to 1: of the whole phrases, or the share of the wanted words that have a like one in the phrase."""
    if not wanted or not phrase:
        return 0.0
    whole = SequenceMatcher(None, wanted, phrase).ratio()
    words = wanted.split()
    found = sum(max(SequenceMatcher(None, word, other).ratio() for other in phrase.split()) >= 0.75 for word in words)
    coverage = found / max(len(words), len(phrase.split()))
    return max(whole, coverage)
