"""Which cause explains a symptom: the rules in the order in which they are asked.

Faults come first, since a slow device, host or front delays everything behind it and would look like a queue. Then
what a setting can mend, each rule only if the step model says that mending it brings the load below the capacity.
Then overload, and last what the workload itself does.
"""

from collections.abc import Callable

from metrics.diagnosis.evidence import Facts
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.rules.candidate import Candidate
from metrics.diagnosis.rules.compute import own_prefill, slow_decode, slow_device, slow_front, slow_host, slow_network
from metrics.diagnosis.rules.memory import kv_pool, prefix_recomputed
from metrics.diagnosis.rules.policy import admission_policy
from metrics.diagnosis.rules.request import batch_cap, burst, long_prompts, overload, prompt_interference, token_budget
from metrics.diagnosis.rules.server import seen_batch_cap, seen_kv_pool, seen_prefix

Rule = Callable[[Facts, Excess | None], Candidate | None]

RULES: tuple[Rule, ...] = (
    slow_device, slow_host, slow_front, slow_network,
    prefix_recomputed, kv_pool, admission_policy, batch_cap, token_budget, long_prompts,
    burst, overload, prompt_interference, slow_decode, own_prefill,
)  # fmt: skip

# Of a server that recorded nothing for us, but shows metrics of its own.
SERVER_RULES: tuple[Rule, ...] = (seen_prefix, seen_kv_pool, seen_batch_cap)

# The symptoms that are not about an objective, and the rules that can name their cause.
RULES_OF_SYMPTOM: dict[str, tuple[Rule, ...]] = {
    "low_device_utilisation": (slow_host,),
    "vram_fills_quickly": (kv_pool, seen_kv_pool),
}


def first_cause(facts: Facts, excess: Excess, rules: tuple[Rule, ...] = RULES) -> Candidate | None:
    """The cause of one excess: the first whose fix would gain something, else the first; None where no rule applies.

    Where requests miss two objectives, mending one of them alone gains nothing, and its cause is no less true.
    """
    found = [candidate for rule in rules if (candidate := rule(facts, excess)) is not None]
    return next((candidate for candidate in found if helps(candidate)), found[0] if found else None)


def helps(candidate: Candidate) -> bool:
    """Whether its own prediction of the gain is more than nothing, as far as it has one."""
    return candidate.gain is None or candidate.gain.then > candidate.gain.now


def cause_of_symptom(facts: Facts, symptom: str) -> Candidate | None:
    """The cause of a symptom that shows without an objective being missed."""
    rules = RULES_OF_SYMPTOM.get(symptom, ())
    return next((found for rule in rules if (found := rule(facts, None)) is not None), None)
