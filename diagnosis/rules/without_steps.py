"""Causes that accounts of time can show where no step was recorded: of late requests, or as means of /metrics.

Without steps nobody knows what the device could serve. So these causes rest on three things: the account that holds
the time, the reason for which requests waited, and what became of the prompt tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.arrivals import OFFERED_LOAD
from sojourn.diagnosis.rules.cause import CONTENTION, QUEUE, Proposal, all_of, cause
from sojourn.diagnosis.rules.shared_evidence import SLOW_DEVICE, excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, Kind, evidence
from sojourn.interop.sources.translate import key
from sojourn.metrics.prediction import Change

DEFINING = 2.0  # weight of the measurement that defines a cause
CROWDED = (*QUEUE, "request.interference")  # time that others cost, but for their blocks
PROMPT_ACCOUNTS = ("compute.prefill", *CONTENTION)
LOST_SHARE = 0.2  # of the prompt tokens: what a prefix policy costs has to be a good part of the work
ROOM = 0.5  # of the tightest time per output token: below it a batch twice as large would keep the objective
STALLED_LOOP_S = 0.05  # mean lateness of the front's timer: many times the millisecond of an idle loop
ALWAYS, OFTEN = 0.8, 0.5  # of the samples, with requests waiting
GROWS = 1.0  # of the mean: a queue that stands is far below it
GAINS, SATURATED = 1.5, 1.2  # tokens/s of twice the batch: 2 on an empty device, 1 on a full one
READS_ONLY = 4.0  # FLOPs a byte: every device computes more than that while it reads one
TPOT_SOURCE, GAIN_SOURCE = "client: chunk_ns; scrapes: tpot_seconds", "scrapes: running, tokens, steps"
INTENSITY_SOURCE = "scrapes: phase_flops, phase_moved_bytes"
ROOM_SOURCES = (TPOT_SOURCE, GAIN_SOURCE, INTENSITY_SOURCE)  # of evidence whether a larger batch would help
TPOT = "sojourn_request_tpot_seconds"
PHASE_FLOPS, PHASE_BYTES = "sojourn_compute_phase_flops_total", "sojourn_compute_phase_moved_bytes_total"
PREDICTION, LOOP_LAG = "sojourn_compute_prediction_ratio", "sojourn_request_loop_lag_seconds"

# Where the front's loop was watched, its own work tells which of these it is (front.py): the account alone does not.
OF_THE_LOOP = ("slow_tokeniser", "slow_detokeniser", "slow_writer")


@dataclass(frozen=True, slots=True)
class Holder:
    """An account whose time names its cause without more ado."""

    key: str
    accounts: tuple[str, ...]
    lifecycles: tuple[str, ...]
    object: str
    kind: Kind
    words: str
    change: str
    rival: str
    scaled: tuple[str, float] | None = None  # the setting that mends it, and its factor


HOLDERS = (
    Holder("slow_tokeniser", ("token.encode",), ("token", "request"), "tokeniser", "fault",
           "prompts wait to be parsed, templated and encoded", "a faster tokeniser, or shorter templates",
           "a front process that is busy with something else"),
    Holder("slow_detokeniser", ("token.decode",), ("token", "request"), "detokeniser", "fault",
           "ids are ready and wait to become text", "find what slows the decoding of ids to text",
           "a front process that is busy with something else"),
    Holder("slow_sampler", ("token.sample",), ("token",), "sampler", "fault",
           "logits are ready and wait to become ids", "cheaper sampling parameters, or a faster sampler",
           "a large vocabulary"),
    Holder("slow_writer", ("request.stream",), ("request",), "writes to the sockets", "fault",
           "text is ready and waits to be written", "find what holds the writes: a slow reader, or the front's loop",
           "one slow reader"),
    Holder("slow_moderation", ("request.moderation",), ("request",), "moderation", "fault",
           "requests wait for the check against policies", "a faster check, or one beside the generation",
           "long texts"),
    Holder("rate_limit", ("request.quota",), ("request",), "limits of a tenant", "policy",
           "requests wait until the tenant's limits have room", "higher limits for the tenant", "overload"),
    Holder("cold_model", ("request.cold_start",), ("request",), "model that is not loaded", "policy",
           "requests wait until their model is loaded or woken",
           "keep the model loaded: more models_gib, a longer model_idle_seconds", "overload"),
    Holder("slow_prefill_server", ("request.remote_prefill",), ("request", "compute"), "prefill server", "capacity",
           "requests wait until a prefill server has computed their prompts",
           "more or faster prefill servers, or prompts that the decode server computes itself",
           "prompts that are long for any server"),
    Holder("slow_kv_transfer", ("memory.transfer",), ("memory",), "KV transfer between servers", "capacity",
           "requests wait for KV that another server has computed",
           "a faster link, and kv_transfer_granularity=chunk with both calls at once",
           "a side channel that answers late"),
    Holder("core_death", ("request.lost",), ("request",), "core process", "fault",
           "requests were in a core that died", "find why the core died", "a server that was stopped"),
    Holder("starved_load_generator", ("client.lag",), ("client",), "load generator", "client",
           "requests are sent later than they were due", "a core of its own for the load generator", "a slow network"),
    Holder("slow_network", ("client.network",), ("client",), "network path between client and server", "client",
           "the time is lost between client and server", "a shorter network path", "a front that reads late"),
    Holder("slow_host", ("compute.host",), ("compute",), "host side of the loop", "fault",
           "the loop keeps the device waiting between its steps", "find what the loop does between the steps",
           "small batches"),
    Holder("token_budget_large", ("request.interference",), ("request", "compute"), "token budget of a step", "policy",
           "prompts of other requests fill the steps", "a smaller max_num_batched_tokens", "a slow device",
           ("max_num_batched_tokens", 0.5)),
    Holder("own_prefill", ("compute.prefill",), ("compute", "token"), "prompt", "capacity",
           "the request's own prompt takes the time", "shorter prompts, or a faster device",
           "other requests' prompts in the same steps"),
)  # fmt: skip


def _register(holder: Holder) -> None:
    def explain(facts: Facts, excess: Excess) -> Proposal | None:
        if holder.key in OF_THE_LOOP and facts.machine is not None and facts.machine.front is not None:
            return None
        settings = _scaled(facts, *holder.scaled) if holder.scaled else None
        found = excess_evidence(excess, holder.accounts)
        return _proposal(excess, holder.words, found, holder.change, None, settings)

    explain.__name__ = holder.key
    explain.__doc__ = holder.words
    cause(lifecycles=holder.lifecycles, object=holder.object, kind=holder.kind, accounts=holder.accounts,
          rival=holder.rival, reads="accounts")(explain)  # fmt: skip


for _holder in HOLDERS:
    _register(_holder)


@cause(lifecycles=("memory", "request"), object="KV block pool", kind="policy", reads="accounts",
       rival="overload: the device is full, and the cache fills because of it", rival_key="overload")  # fmt: skip
def kv_pool(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for blocks, or lose theirs and compute again."""
    claims = dict.fromkeys(("memory.blocked", "memory.preempted", "memory.recompute"), 1.0)
    claims["request.queue"] = facts.waits.get("kv_blocks", 0.0)
    found = [*excess_evidence(excess, tuple(claims)), *_waited_for(facts, "kv_blocks")]
    return _proposal(excess, "requests wait for KV blocks, or lose theirs and compute again", found,
                     "a larger num_kv_blocks, or fewer requests at a time", claims,
                     _scaled(facts, "num_kv_blocks", 2))  # fmt: skip


@cause(lifecycles=("request", "compute"), object="batch cap (max_num_seqs)", kind="policy", accounts=QUEUE,
       reason="batch_cap", reads="accounts", rival="overload: the device is full", rival_key="overload")  # fmt: skip
def batch_cap(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for a place while the others' tokens come fast: the device could take more."""
    found = [*excess_evidence(excess, QUEUE), *_waited_for(facts, "batch_cap"), *_room(facts, wanted=True)]
    words = "requests wait for a place in the batch, though tokens come fast enough for a larger one"
    return _proposal(excess, words, found, "a larger max_num_seqs", None, _scaled(facts, "max_num_seqs", 2))


@cause(lifecycles=("request", "compute"), object="token budget of a step", kind="policy", accounts=QUEUE,
       reason="token_budget", reads="accounts", rival="overload", rival_key="overload")  # fmt: skip
def token_budget(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for room in the token budget of a step."""
    found = [*excess_evidence(excess, QUEUE), *_waited_for(facts, "token_budget"), *_room(facts, wanted=True)]
    return _proposal(excess, "requests wait for room in the token budget of a step", found,
                     "a larger max_num_batched_tokens", None,
                     _scaled(facts, "max_num_batched_tokens", 2))  # fmt: skip


@cause(lifecycles=("request",), object="admission policy", kind="policy", accounts=QUEUE, reason="policy",
       reads="accounts", rival="overload", rival_key="overload")  # fmt: skip
def admission_policy(facts: Facts, excess: Excess) -> Proposal | None:
    """The policy lets requests wait."""
    found = [*excess_evidence(excess, QUEUE), *_waited_for(facts, "policy")]
    return _proposal(excess, "the admission policy lets requests wait", found, "policy=fcfs")


@cause(lifecycles=("request", "compute"), object=OFFERED_LOAD, kind="capacity", accounts=CROWDED, reads="accounts",
       rival="a limit on the batch", rival_key="batch_cap")  # fmt: skip
def overload(facts: Facts, excess: Excess) -> Proposal | None:
    """The queue grows over the run, and tokens come as slowly as the objective allows."""
    grows = _growth(facts)
    stands = is_saturated(facts) and _wait_share(facts) >= ALWAYS
    if not facts.waits or (grows is None and not stands):  # without the reasons a limit looks alike
        return None
    words = "more arrives than is served, and the queue grows over the run"
    if grows is None:
        words = "requests wait all the time, and more of them in a batch give hardly more tokens"
    found = [*excess_evidence(excess, CROWDED), *filter(None, [grows]), *_room(facts, wanted=False)]
    for_place = sum(facts.waits.get(reason, 0.0) for reason in ("batch_cap", "token_budget"))
    claims = all_of(QUEUE, for_place) | {"request.interference": 1.0}
    return _proposal(excess, words, found,
                     "fewer requests, or more devices", claims)  # fmt: skip


def _growth(facts: Facts) -> Evidence | None:
    """That the queue grows: by the times to first token, or where no client measured them by the gauge."""
    growth = signs_of(facts).growth
    if growth is not None and growth >= GROWS:
        return evidence(f"the time to first token grows over the run by {growth:.1f} times its mean", growth, "ratio",
                        "client: due_ns, first_token_ns")  # fmt: skip
    waiting = facts.server.waiting if facts.server is not None and growth is None else None
    if waiting is None or waiting.growth is None or waiting.growth < GROWS or waiting.share < OFTEN:
        return None
    return evidence(f"the number of waiting requests grows by {waiting.growth:.1f} times its mean", waiting.growth,
                    "ratio", "scrapes: gauges")  # fmt: skip


def _wait_share(facts: Facts) -> float:
    waiting = facts.server.waiting if facts.server is not None else None
    return waiting.share if waiting is not None else 0.0


@cause(lifecycles=("request",), object="arrivals", kind="workload", accounts=CONTENTION, reads="accounts",
       rival="lost capacity: a server that is slower than it was")  # fmt: skip
def burst(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait, and arrivals come in bursts."""
    arrivals = facts.arrivals
    if arrivals is None or not arrivals.bursty:
        return None
    bursts = evidence(f"the gaps between arrivals vary {arrivals.cv:.1f} times as much as their mean", arrivals.cv,
                      "ratio", "client: due_ns", weight=DEFINING)  # fmt: skip
    found = [*excess_evidence(excess, CONTENTION), bursts]
    words = "arrivals come in bursts, and wait for each other"
    return _proposal(excess, words, found, "smoother arrivals, or room for the peaks")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a share of the prompt tokens became, and the cause that it stands for."""

    name: str
    key: str
    kind: Kind
    words: str
    change: str
    settings: Callable[[Facts], dict[str, object]] | None = None


OUTCOMES = (
    Outcome("miss_disabled", "prefix_cache_off", "policy", "the prefix cache is off", "prefix_caching=true",
            lambda facts: {"prefix_caching": True}),
    Outcome("miss_evicted", "cache_thrash", "capacity", "prefixes were evicted before their next use",
            "a larger num_kv_blocks", lambda facts: _scaled(facts, "num_kv_blocks", 2)),
    Outcome("miss_sub_block", "prefix_sub_block", "policy", "prefixes end within a block, which is not shared",
            "a smaller block_size", lambda facts: _scaled(facts, "block_size", 0.5)),
    Outcome("miss_diverged", "prefix_order", "workload", "prompts differ before the part that they share",
            "the part that changes behind the part that is shared"),
)  # fmt: skip


def _register_outcome(outcome: Outcome) -> None:
    def explain(facts: Facts, excess: Excess) -> Proposal | None:
        lost = facts.prefix.outcomes.get(outcome.name, 0.0) if facts.prefix is not None else 0.0
        if lost < LOST_SHARE:
            return None
        found = [
            *excess_evidence(excess, PROMPT_ACCOUNTS),
            evidence(f"{lost:.0%} of the prompt tokens are computed again: {outcome.words}", lost, "share",
                     f"prefix outcomes: {outcome.name}", weight=DEFINING),
        ]  # fmt: skip
        return _proposal(excess, f"{outcome.words}: {lost:.0%} of the prompt tokens are computed again", found,
                         outcome.change, all_of(PROMPT_ACCOUNTS, lost),
                         outcome.settings(facts) if outcome.settings else None)  # fmt: skip

    explain.__name__ = outcome.key
    explain.__doc__ = outcome.words
    cause(lifecycles=("memory", "compute", "request"), object="prefix cache", kind=outcome.kind,
          accounts=PROMPT_ACCOUNTS, rival="cold traffic", reads="accounts")(explain)  # fmt: skip


for _outcome in OUTCOMES:
    _register_outcome(_outcome)


@cause(lifecycles=("compute",), object="device", kind="fault", accounts=("compute.decode", "compute.prefill"),
       reads="accounts", rival="large batches", rival_key="slow_decode")  # fmt: skip
def slow_device(facts: Facts, excess: Excess) -> Proposal | None:
    """The server's own metric of device time over predicted time is above one."""
    ratio = _mean_of(facts, PREDICTION)
    if ratio is None or ratio < SLOW_DEVICE:
        return None
    slow = evidence(f"steps take {ratio:.1f} times as long as their composition explains", ratio, "ratio",
                    f"scrapes: {PREDICTION}", weight=DEFINING)  # fmt: skip
    accounts = ("compute.decode", "compute.prefill")
    return _proposal(excess, f"the device takes {ratio:.1f} times as long as its steps explain",
                     [slow, *excess_evidence(excess, accounts)], "find what slows the device")  # fmt: skip


@cause(lifecycles=("compute",), object="decode step", kind="capacity", accounts=("compute.decode",), reads="accounts",
       rival="a fault of the device", rival_key="slow_device")  # fmt: skip
def slow_decode(facts: Facts, excess: Excess) -> Proposal | None:
    """Decode steps take the time."""
    return _proposal(excess, "decode steps take longer than the objective allows",
                     excess_evidence(excess, ("compute.decode",)), "a smaller batch, or a faster device")  # fmt: skip


@cause(lifecycles=("request", "token"), object="event loop of the front", kind="fault", reads="accounts",
       accounts=("request.stream", "token.decode", "token.encode", "client.network"),
       rival="a slow network", rival_key="slow_network")  # fmt: skip
def blocked_front(facts: Facts, excess: Excess) -> Proposal | None:
    """The timer of the front's event loop comes late."""
    lag_s = _mean_of(facts, LOOP_LAG)
    if lag_s is None or lag_s < STALLED_LOOP_S:
        return None
    late = evidence(f"the timer of the front's event loop comes {1000 * lag_s:,.0f} ms late on average", 1000 * lag_s,
                    "ms", f"scrapes: {LOOP_LAG}", weight=DEFINING)  # fmt: skip
    accounts = ("request.stream", "token.decode", "token.encode", "client.network")
    found = [late, *excess_evidence(excess, accounts)]
    return _proposal(excess, "something holds the event loop of the front", found, "find what holds the loop")


@cause(lifecycles=("client", "request"), object="readers of the answers", kind="client", reads="accounts",
       accounts=("request.stream",), rival="a busy front", rival_key="slow_writer")  # fmt: skip
def slow_reader(facts: Facts, excess: Excess) -> Proposal | None:
    """Text waits to be written while the front's event loop is on time: its readers take it late."""
    lag_s = _mean_of(facts, LOOP_LAG)
    if lag_s is None or lag_s >= STALLED_LOOP_S:
        return None
    on_time = evidence(f"the timer of the front's event loop comes {1000 * lag_s:,.1f} ms late: the loop is free "
                       "to write", 1000 * lag_s, "ms", f"scrapes: {LOOP_LAG}", weight=DEFINING)  # fmt: skip
    return _proposal(excess, "text is ready and the loop is free, but readers take it late",
                     [on_time, *excess_evidence(excess, ("request.stream",))],
                     "clients that read faster, or a proxy that buffers")  # fmt: skip


def _proposal(
    excess: Excess, words: str, found: list[Evidence], change: str,
    claims: dict[str, float] | None = None, settings: dict[str, object] | None = None,
) -> Proposal:  # fmt: skip
    return Proposal(
        cause=words,
        evidence=found,
        measurement="the same scenario with the records of each step",
        settings={},
        if_cause=f"with {change} {missing_share(excess)} falls",
        if_rival=f"with {change} {missing_share(excess)} stays",
        change=change,
        claims=claims,
        fixes=(Change(settings=settings),) if settings else (),
    )


def _scaled(facts: Facts, name: str, factor: float) -> dict[str, object]:
    """A setting times a factor; {} where its value is not known. Without steps nobody knows how much is enough."""
    value = facts.engine.get(name)
    return {name: max(1, round(value * factor))} if isinstance(value, int) else {}


def _waited_for(facts: Facts, reason: str) -> list[Evidence]:
    share = facts.waits.get(reason, 0.0)
    if not facts.waits:
        return []
    return [evidence(f"{share:.0%} of the waiting has the reason {reason}", share, "share", "requests: waits",
                     supports=share >= 0.5, weight=DEFINING)]  # fmt: skip


def _room(facts: Facts, *, wanted: bool) -> list[Evidence]:
    """Whether a larger batch would keep the time per output token: the tokens come in half of the time, or sooner; a
    larger batch gave more tokens before; or a step reads far more than it computes."""
    found = batch_gain_evidence(facts, wanted=wanted)
    bound = tightest(facts, "tpot_ms")
    per_token = facts.rows.tpot_ms.astype("float64").median()
    if not per_token > 0:
        per_token = 1e3 * (_mean_of(facts, TPOT) or 0.0)
    if bound is not None and per_token > 0:
        used = per_token / bound
        found.append(evidence(f"the time per output token is {used:.0%} of its objective", used, "share",
                              TPOT_SOURCE, supports=(used <= ROOM) == wanted))  # fmt: skip
    intensity = _decode_intensity(facts)
    if intensity is not None and intensity <= READS_ONLY:
        found.append(evidence(f"a decode step computes {intensity:.1f} FLOPs for each byte that it reads, so that a "
                              "larger batch costs it little", intensity, "FLOP/byte",
                              INTENSITY_SOURCE, supports=wanted))  # fmt: skip
    return found


def batch_gain_evidence(facts: Facts, *, wanted: bool) -> list[Evidence]:
    """What more requests in a batch gave until now."""
    gain = facts.batch_gain
    if gain is None or SATURATED < gain < GAINS:
        return []
    return [evidence(f"twice the requests in a batch give {gain:.1f} times the tokens", gain, "ratio",
                     GAIN_SOURCE, supports=(gain >= GAINS) == wanted, weight=DEFINING)]  # fmt: skip


def is_saturated(facts: Facts) -> bool:
    """Whether twice the requests in a batch gave hardly more tokens: the device is full."""
    return facts.batch_gain is not None and facts.batch_gain <= SATURATED


def _decode_intensity(facts: Facts) -> float | None:
    totals = facts.server.totals if facts.server is not None else {}
    flops, moved = (totals.get(key(name, (("composition", "decode"),)), 0.0) for name in (PHASE_FLOPS, PHASE_BYTES))
    return flops / moved if moved > 0 else None


def _mean_of(facts: Facts, family: str) -> float | None:
    seen = facts.server.latencies.get(family) if facts.server is not None else None
    return seen.mean if seen is not None else None
