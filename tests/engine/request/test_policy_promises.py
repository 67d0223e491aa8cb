"""What each scheduling policy promises: who goes first, and how long an adversary can make anybody wait."""

import pytest
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import Submit
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.request.policies.fair_share import TenantQueues
from sojourn.engine.request.policies.policy import RankedQueue
from sojourn.engine.request.request import Request
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.ledger import Account
from tests.engine.simulated import Simulation

LONG = {"max_long_prefills": 1, "long_prefill_tokens": 10}


def ask(name: str, length: int = 4, max_tokens: int = 4, *, tenant: str = "", priority: int = 0) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
    prompt = [sum(name.encode()) % 50, *(i % 50 for i in range(length - 1))]
    return Submit(name, prompt, sampling, 0, tenant=tenant, priority=priority)


def order_of_service(simulation: Simulation) -> list[str]:
    """Requests in the order in which they first computed something."""
    return list(dict.fromkeys(name for step in simulation.published.records for name in step.request_ids))


def served_after(simulation: Simulation, *messages: Submit) -> list[str]:
    """The order of service of requests that arrive together, behind one that has the only place."""
    simulation.receive(ask("first", 4, 3))
    simulation.step()
    simulation.receive(*messages)
    simulation.drain()
    simulation.check_idle()
    return order_of_service(simulation)[1:]


def flood(simulation: Simulation, victim: Submit, attack, steps: int) -> int:
    """Sends the victim, then what `attack(step)` says before each step. How many others went before the victim."""
    simulation.receive(ask("first", 4, 3))
    simulation.step()
    simulation.receive(victim)
    for step in range(steps):
        simulation.receive(*attack(step))
        simulation.step()
        if victim.request_id in simulation.published.ended:
            simulation.engine.flush()
            return order_of_service(simulation).index(victim.request_id) - 1
    raise AssertionError(f"starved for {steps} steps")


def test_fcfs_serves_in_order_of_arrival():
    messages = [ask("long", 30), ask("short", 2, priority=-1), ask("middle", 10)]
    assert served_after(Simulation(max_num_seqs=1), *messages) == ["long", "short", "middle"]


def test_priority_serves_lower_numbers_first_and_equals_in_order_of_arrival():
    messages = [ask("low", priority=2), ask("a", priority=1), ask("b", priority=1), ask("late", priority=1)]
    assert served_after(Simulation(max_num_seqs=1, policy="priority"), *messages) == ["a", "b", "late", "low"]


@pytest.mark.parametrize(
    "bounds", [{"max_num_seqs": 2}, {"num_blocks": 10, "prefix_caching": False}], ids=["places", "blocks"]
)
def test_priority_throws_out_the_last_of_lower_rank_and_no_more_than_needed(bounds):
    simulation = Simulation(policy="priority", **bounds)
    simulation.receive(ask("keep", 14, 3, priority=1), ask("lose", 14, 3, priority=2))
    simulation.step()
    simulation.receive(ask("urgent", 10, 3, priority=0))
    simulation.step()
    assert {r.id for r in simulation.scheduler.running} == {"keep", "urgent"}
    simulation.drain()
    simulation.check_idle()
    ended = simulation.published.ended
    assert (ended["keep"].preemptions, ended["lose"].preemptions, ended["urgent"].preemptions) == (0, 1, 0)
    assert ended["lose"].ledger[Account.MEMORY_PREEMPTED] > 0


def test_priority_throws_nobody_out_for_an_equal_or_in_vain():
    equal = Simulation(policy="priority", max_num_seqs=1)
    equal.receive(ask("a", 4, 6))
    equal.step()
    equal.receive(ask("b", 4, 6))
    equal.drain()
    assert equal.published.ended["a"].preemptions == 0
    vain = Simulation(policy="priority", num_blocks=10, prefix_caching=False)
    vain.receive(ask("peer", 17, 3), ask("low", 10, 3, priority=5))
    vain.step()
    vain.receive(ask("huge", 30, 2))  # would not fit without `low` either
    vain.step()
    assert [r.id for r in vain.scheduler.running] == ["peer", "low"]
    vain.drain()
    assert vain.published.ended["low"].preemptions == 0


def test_priority_lets_an_older_equal_that_was_held_aside_throw_nobody_out():
    simulation = Simulation(policy="priority", max_num_seqs=2, max_prefill_chunk_tokens=6, **LONG)
    simulation.receive(ask("long0", 20, 12), ask("long1", 20, 1), ask("later", 4, 12))
    simulation.step()
    simulation.receive(ask("latest", 4, 12))
    simulation.drain()
    assert all(ended.preemptions == 0 for ended in simulation.published.ended.values())
    assert order_of_service(simulation) == ["long0", "later", "long1", "latest"]


@pytest.mark.parametrize("gap", [1, 3])
def test_priority_lets_no_more_than_the_promised_number_overtake(gap):
    simulation = Simulation(policy="priority", knobs={"priority_ageing": 5}, max_num_seqs=2)
    overtaken = flood(
        simulation,
        ask("victim", priority=gap),
        lambda step: [ask(f"vip{step}.{i}") for i in range(2)],
        steps=200,
    )
    assert 0 < overtaken <= 5 * gap
    assert simulation.published.ended["victim"].preemptions == 0  # those who could throw it out went before it


def test_shortest_prefill_first_serves_the_least_uncached_work_first():
    simulation = Simulation(policy="shortest-prefill-first", knobs={"shortest_ageing": 1}, max_num_seqs=1)
    simulation.receive(ask("long", 30, 1))
    simulation.drain()
    again = Submit("again", ask("long", 30).prompt_token_ids, SamplingParams(max_tokens=2, temperature=0), 0)
    order = served_after(simulation, ask("middle", 20), ask("short", 9), again, ask("tiny", 1))
    assert order[1:] == ["again", "tiny", "short", "middle"]  # of its 30 tokens 2 are to be computed


def test_shortest_prefill_first_lets_no_more_than_the_promised_number_overtake():
    simulation = Simulation(policy="shortest-prefill-first", knobs={"shortest_ageing": 2}, max_num_seqs=1)
    overtaken = flood(simulation, ask("victim", 30), lambda step: [ask(f"s{step}", 1, 3)], steps=200)
    assert 5 < overtaken < 30 / 2


def test_static_batching_admits_nobody_until_the_batch_is_done():
    simulation = Simulation(policy="static", max_num_seqs=3)
    simulation.receive(ask("a", 4, 9), ask("b", 4, 3))
    simulation.step()
    simulation.step()
    simulation.receive(ask("c", 4, 3), ask("d", 4, 3))  # there is a place, but the batch decodes
    simulation.drain()
    simulation.check_idle()
    ended, records = simulation.published.ended, simulation.published.records
    assert ended["b"].last_step < ended["a"].last_step < ended["c"].first_step == ended["d"].first_step
    alone = [step for step in records if step.request_ids == ["a"]]
    assert len(alone) > 3 and all(step.refusals == {"policy": 1, "behind_head": 1} for step in alone)
    assert ended["c"].ledger[Account.REQUEST_QUEUE] > 6 * simulation.steps.step_ns


def test_static_batching_fills_its_batch_over_several_steps_before_it_decodes():
    simulation = Simulation(policy="static", max_num_seqs=4, max_num_batched_tokens=10)
    simulation.receive(*[ask(f"r{i}", 16, 3) for i in range(4)])
    simulation.drain()
    kinds = [set(step.kinds) for step in simulation.published.records]
    prompts = kinds.count({"prefill"})
    assert kinds == [{"prefill"}] * prompts + [{"decode"}] * (len(kinds) - prompts) and prompts >= 6


def test_static_batching_closes_its_batch_while_scoring_requests_keep_coming():
    simulation = Simulation(policy="static", max_num_seqs=3)
    before = flood(
        simulation, ask("victim", 4, 5), lambda step: [ask(f"s{step}.{i}", 4, 1) for i in range(3)], steps=40
    )
    assert before <= 3


def test_prefill_first_never_mixes_and_stalls_decodes_for_prompts():
    simulation = Simulation(policy="prefill-first", max_num_batched_tokens=10)
    simulation.receive(ask("chat", 4, 8))
    simulation.step()
    simulation.step()
    simulation.receive(ask("long", 41, 4))
    simulation.drain()
    kinds = [step.kinds for step in simulation.published.records]
    assert all(len(set(kind)) == 1 for kind in kinds)
    assert [kind[0] for kind in kinds[:7]] == ["prefill", "decode", *["prefill"] * 5]  # its last token alone, too
    assert simulation.published.ended["chat"].ledger[Account.REQUEST_INTERFERENCE] >= 5 * simulation.steps.step_ns


def test_prefill_first_gives_decodes_a_step_after_the_promised_number_of_others():
    simulation = Simulation(policy="prefill-first", knobs={"prefill_patience": 4}, max_num_seqs=3)
    flood(simulation, ask("victim", 4, 6), lambda step: [ask(f"s{step}.{i}", 4, 1) for i in range(3)], steps=60)
    row = longest = 0
    for step in simulation.published.records:
        row = 0 if "decode" in step.kinds else row + 1
        longest = max(longest, row)
    assert longest == 4


def weigh(simulation: Simulation, tenants: dict[str, str]) -> dict[str, int]:
    """What each tenant was served so far: computed prompt tokens, and twice the drawn ones."""
    served = dict.fromkeys(tenants.values(), 0)
    for step in simulation.published.records:
        for name, new, kind in zip(step.request_ids, step.new_tokens, step.kinds, strict=True):
            served[tenants[name]] += new if kind == "prefill" else 2 * new
    return served


def test_fair_share_serves_two_tenants_alike_however_many_requests_one_of_them_sends():
    simulation = Simulation(200, policy="fair-share", max_num_seqs=2, prefix_caching=False)
    messages = [ask(f"greedy{i}", 8, 12, tenant="greedy") for i in range(60)]
    messages += [ask(f"modest{i}", 8, 2, tenant="modest") for i in range(40)]
    tenants = {message.request_id: message.tenant for message in messages}
    simulation.receive(*messages)
    bound = 2 * max(8, 2 * 2 * 20)  # longest prompt; tokens of the running batch, weighed
    while simulation.scheduler.policy.queue._queues.get("modest"):  # both have somebody in the line
        simulation.step()
        served = weigh(simulation, tenants)
        assert abs(served["greedy"] - served["modest"]) <= bound
    assert min(served.values()) > 200
    simulation.drain()
    simulation.check_idle()


def test_fair_share_lets_one_tenant_have_everything_while_no_other_waits():
    simulation = Simulation(policy="fair-share", max_num_seqs=4)
    simulation.receive(*[ask(f"r{i}", tenant="only") for i in range(9)])
    simulation.step()
    assert len(simulation.scheduler.running) == 4


def test_fair_share_charges_a_preempted_request_once():
    simulation = Simulation(num_blocks=7, prefix_caching=False, policy="fair-share")
    simulation.receive(ask("old", 8, 12, tenant="only"), ask("new", 8, 12, tenant="only"))
    simulation.drain()
    assert simulation.published.ended["new"].preemptions > 0
    assert simulation.scheduler.policy.queue._counters == {"only": 2 * (8 + 2 * 12)}


def test_fair_share_lets_nobody_save_up_by_staying_away():
    simulation = Simulation(policy="fair-share", max_num_seqs=1, prefix_caching=False)
    simulation.receive(ask("early", 4, 1, tenant="away"), *[ask(f"busy{i}", 8, 4, tenant="busy") for i in range(40)])
    for _ in range(60):
        simulation.step()
    simulation.receive(*[ask(f"back{i}", 8, 4, tenant="away") for i in range(10)])
    simulation.drain()
    order = [name.rstrip("0123456789") for name in order_of_service(simulation)]
    since = order[order.index("back") :][:10]
    assert since.count("back") == since.count("busy") == 5  # else it had all of them


def test_fair_share_holds_nobody_back_for_ever_for_new_tenants():
    simulation = Simulation(policy="fair-share", max_num_seqs=1, prefix_caching=False)
    simulation.scheduler.policy.queue._max_overtakes = 20
    simulation.receive(ask("before", 30, 10, tenant="victim"), ask("x", tenant="x"), ask("y", tenant="y"))
    overtaken = flood(
        simulation, ask("victim", tenant="victim"), lambda step: [ask(f"n{step}", tenant=f"n{step}")], 400
    )
    assert 10 < overtaken <= 2 + 20 + 2


@pytest.mark.parametrize("places", [1, 2, 3])
def test_fair_share_holds_no_long_prompt_back_for_ever_for_those_of_new_tenants(places):
    """Whenever its turn comes by age, another one's long prompt has the slot."""
    bounds = {"max_num_seqs": places, "max_num_batched_tokens": 16, "prefix_caching": False}
    simulation = Simulation(200, policy="fair-share", **bounds, **LONG)
    queue = simulation.scheduler.policy.queue
    queue._max_overtakes = 20
    simulation.receive(ask("before", 30, 10, tenant="victim"), ask("x", tenant="x"), ask("y", tenant="y"))
    overtaken = flood(
        simulation,
        ask("victim", 30, 2, tenant="victim"),
        lambda step: [ask(f"n{step}", 30, 2, tenant=f"n{step}"), ask(f"m{step}", 3, 2, tenant=f"m{step}")],
        steps=400,
    )
    assert overtaken <= 2 + 20 + 20  # those who came before it, those by the promise, short ones until a slot was free
    assert not queue.claims and not queue._due


def test_fair_share_forgets_tenants_that_owe_nothing(monkeypatch):
    monkeypatch.setattr("sojourn.engine.request.policies.fair_share.MAX_TENANTS", 8)
    simulation = Simulation(policy="fair-share")
    for index in range(100):
        simulation.receive(ask(f"r{index}", tenant=f"t{index}"))
        simulation.step()
    simulation.drain()
    assert len(simulation.scheduler.policy.queue._counters) <= 8 + 8  # the limit, and those who are served now


def test_no_more_long_prompts_than_allowed_run_at_once_and_short_ones_overtake():
    simulation = Simulation(max_num_batched_tokens=20, max_prefill_chunk_tokens=6, **LONG)
    simulation.receive(*[ask(f"long{i}", 30, 3) for i in range(3)], *[ask(f"short{i}", 3, 3) for i in range(2)])
    long_at_once = []
    while simulation.engine.has_work:
        simulation.step()
        step = simulation.last_step_record()
        prefills = [name for name, kind in zip(step.request_ids, step.kinds, strict=True) if kind == "prefill"]
        long_at_once.append(sum(name.startswith("long") for name in prefills))
    simulation.drain()
    simulation.check_idle()
    assert max(long_at_once) == 1
    assert order_of_service(simulation) == ["long0", "short0", "short1", "long1", "long2"]


def test_waiting_behind_long_prompts_is_queueing_by_the_policy():
    simulation = Simulation(max_num_batched_tokens=20, max_prefill_chunk_tokens=4, num_blocks=10, **LONG)
    simulation.receive(ask("long0", 30, 3), ask("long1", 30, 3), ask("memory", 10, 3))
    simulation.step()
    assert simulation.last_step_record().refusals == {"kv_blocks": 1, "policy": 1}
    for _ in range(4):
        simulation.step()
    simulation.drain()
    simulation.check_idle()
    ledger = simulation.published.ended["long1"].ledger
    assert ledger[Account.REQUEST_QUEUE] > 5 * simulation.steps.step_ns
    assert simulation.published.ended["memory"].ledger[Account.REQUEST_QUEUE] < simulation.steps.step_ns


def test_a_long_prompt_is_served_under_a_stream_of_short_ones():
    simulation = Simulation(max_num_batched_tokens=16, max_num_seqs=3, **LONG)
    simulation.receive(ask("other", 30, 2))
    overtaken = flood(simulation, ask("victim", 30, 2), lambda step: [ask(f"s{step}", 3, 2)], steps=100)
    assert overtaken < 20


def test_every_policy_can_be_chosen_and_no_other():
    offered = EngineConfig.model_fields["policy"].annotation.__args__
    assert set(offered) == set(POLICIES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_prefill_chunk_tokens": 600, "max_num_batched_tokens": 512}, "max_num_batched_tokens=512"),
        ({"max_long_prefills": 2}, "go together"),
        ({"long_prefill_tokens": 2}, "go together"),
        ({"max_long_prefills": 9, "long_prefill_tokens": 5, "max_num_seqs": 8}, "above max_num_seqs=8"),
        ({"priority_ageing": 3}, "only policy=priority"),
        ({"policy": "priority", "shortest_ageing": 3}, "only policy=shortest-prefill-first"),
        ({"policy": "static", "fair_output_weight": 3}, "policy is static"),
        ({"prefill_patience": 0, "policy": "prefill-first"}, "greater than or equal to 1"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(ValidationError, match=says):
        EngineConfig(model="m", **settings)


def test_a_config_survives_the_way_to_the_core():
    config = EngineConfig(model="m", policy="priority", priority_ageing=3, max_long_prefills=1, long_prefill_tokens=9)
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config


QUEUES = [RankedQueue(lambda request: (request.arrival_index,)), TenantQueues(1000)]


@pytest.mark.parametrize("queue", QUEUES, ids=["one", "many"])
def test_requests_that_leave_from_the_middle_of_a_queue_do_not_pile_up(queue):
    first = Request(0, "r", 1, [1], SamplingParams(max_tokens=1))
    queue.push(first)
    for order in range(1, 5_000):
        request = Request(order, "r", 1, [1], SamplingParams(max_tokens=1), tenant="other")
        queue.push(request)
        queue.remove(request)
    assert queue.head() is first and len(queue._heap) < 100
