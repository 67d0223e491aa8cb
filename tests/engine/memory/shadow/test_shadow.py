"""What became of every prompt token, by examples; what the shadow index remembers, and that it changes nothing."""

import pytest

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.memory.shadow.index import ShadowIndex
from sojourn.engine.memory.shadow.observer import ShadowObserver
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.memory.prefix_outcomes import PrefixReport, combined
from tests.engine.memory.audits import num_salts
from tests.engine.simulated import Simulation

SIZE = 4
A, B, C = [1] * 8, [2] * 8, [3] * 8  # two blocks each


def ask(name: str, prompt: list[int], max_tokens: int = 1, prompt_logprobs: int | None = None, **more) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, prompt_logprobs=prompt_logprobs)
    return Submit(name, prompt, sampling, 0, **more)


def served(simulation: Simulation, *requests: Submit) -> PrefixReport:
    """Serves one after the other; the report of the last."""
    for request in requests:
        simulation.receive(request)
        simulation.drain()
    simulation.check_idle()
    return simulation.published.ended[requests[-1].request_id].prefix


def test_a_prompt_that_was_never_seen_is_cold():
    report = served(Simulation(), ask("a", A + B))
    assert report == PrefixReport({"miss_cold": 16}, 0, None, {}, None, [0] * 5, None, 0, 0, 0)


def test_blocks_that_are_cached_hit_and_what_is_known_behind_them_is_below_a_block():
    report = served(Simulation(), ask("a", A + B), ask("b", A + B))
    assert report.prefix_outcomes == {"hit": 12, "miss_sub_block": 4}  # the last token is always computed
    assert (report.infinite_hit_tokens, report.diverged_at) == (12, None)
    assert (report.prefix_source, report.prefix_shared_tokens) == ("a", 16)
    assert report.resized_hit_tokens == [12] * 5


def test_a_conversation_that_goes_on_is_new_behind_its_end():
    simulation = Simulation()
    served(simulation, ask("a", [*A, 9, 9], 2))  # the first of its two output tokens is computed, too
    told = simulation.published.tokens["a"]
    report = served(simulation, ask("b", [*A, 9, 9, *told, 5, 5, 5, 5]))
    assert report.prefix_outcomes == {"hit": 8, "miss_sub_block": 3, "miss_cold": 5}
    assert report.diverged_at is None
    assert (report.prefix_source, report.prefix_shared_tokens) == ("a", 11), "its last token was never computed"


def test_a_conversation_that_leaves_a_known_one_diverges_at_that_token():
    report = served(Simulation(), ask("a", A + B + C), ask("b", [*A, *B[:6], 7, *C]))
    assert report.prefix_outcomes == {"hit": 12, "miss_sub_block": 2, "miss_diverged": 9}
    assert report.diverged_at == 14


def test_a_beginning_of_less_than_a_block_is_below_a_block_and_the_rest_is_cold():
    report = served(Simulation(), ask("a", A + B), ask("b", [1, 1, 1, *B]))
    assert report.prefix_outcomes == {"miss_sub_block": 3, "miss_cold": 8}
    assert (report.diverged_at, report.prefix_source, report.prefix_shared_tokens) == (3, "a", 3)


def test_what_was_evicted_names_who_took_it_and_how_long_ago():
    simulation = Simulation(num_blocks=6)
    served(simulation, ask("a", A + B), ask("greedy", C * 3))
    evicted_ns = simulation.published.records[-1].begin_ns
    simulation.clock.now_ns += 5_000_000
    report = served(simulation, ask("again", A + B))
    assert report.prefix_outcomes == {"miss_evicted": 12, "miss_sub_block": 4}
    assert report.infinite_hit_tokens == 12
    assert report.evicted_by == {"greedy": 12}
    assert report.evicted_ago_ns > 5_000_000 and report.evicted_ago_ns > simulation.clock.now_ns - evicted_ns - 10**7
    assert report.resized_hit_tokens == [0, 0, 12, 12, 12]  # 10 blocks in all


def test_what_is_evicted_in_part_hits_before_it_and_not_behind():
    simulation = Simulation(num_blocks=6)
    report = served(simulation, ask("a", A + B), ask("b", [*C, *[5] * 5]), ask("again", A + B))
    assert report.prefix_outcomes == {"hit": 8, "miss_evicted": 4, "miss_sub_block": 4}
    assert report.evicted_by == {"b": 4}


def test_what_another_request_computes_at_this_moment_is_in_flight():
    simulation = Simulation(max_prefill_chunk_tokens=8)
    simulation.receive(ask("a", A + B, 4))
    simulation.step()
    simulation.receive(ask("b", [*A, *B, 5], 4), ask("c", [*A, *C], 1))
    simulation.drain()
    assert simulation.published.ended["b"].prefix.prefix_outcomes == {"hit": 8, "miss_in_flight": 8, "miss_cold": 1}
    c = simulation.published.ended["c"].prefix
    assert c.prefix_outcomes in ({"hit": 8, "miss_cold": 8}, {"hit": 8, "miss_diverged": 8})
    simulation.check_idle()


def test_the_last_block_of_a_prompt_is_in_flight_for_nobody():
    simulation = Simulation()
    simulation.receive(ask("a", A + B), ask("b", A + B))
    simulation.drain()
    assert simulation.published.ended["b"].prefix.prefix_outcomes == {"miss_in_flight": 12, "miss_cold": 4}
    simulation.check_idle()


def test_what_the_queue_head_waits_to_read_is_used_in_the_shadow_as_in_the_pool():
    """The running request evicts something else; `check` would see the shadow evict what the head asked for."""
    simulation = Simulation(num_blocks=8)
    served(simulation, ask("a", A), ask("b", B))
    simulation.receive(ask("grows", C, 13), ask("head", [*A, *[9] * 16]))
    simulation.drain()
    assert simulation.published.ended["head"].prefix.prefix_outcomes["hit"] == 8
    report = served(simulation, ask("b2", [*B, 1]))
    assert report.evicted_by == {"head": 8} or report.evicted_by == {"grows": 4, "head": 4}


def test_who_is_aborted_computes_nothing_any_more():
    simulation = Simulation(max_num_batched_tokens=4, max_num_seqs=2)
    simulation.receive(ask("a", A + B, 4))
    simulation.step()
    simulation.receive(Abort("a"))
    report = served(simulation, ask("b", [*A, *B, 5]))
    assert report.prefix_outcomes == {"hit": 4, "miss_cold": 13}


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["caching off", "log-probabilities of the prompt"])
def test_what_an_infinite_cache_would_have_hit_is_disabled(prefix_caching):
    simulation = Simulation(prefix_caching=prefix_caching)
    scored = 0 if prefix_caching else None
    report = served(simulation, ask("a", A + B), ask("b", [*A, *B, 7], prompt_logprobs=scored))
    assert report.prefix_outcomes == {"miss_disabled": 16, "miss_cold": 1}
    assert (report.infinite_hit_tokens, report.evicted_by) == (16, {})
    assert report.resized_hit_tokens == ([0] * 5 if prefix_caching else [16] * 5)  # what a cache of that size would do


def test_the_example_that_explains_the_outcomes_is_true():
    a_to_j = list(b"abcdefghij")
    simulation = Simulation(num_blocks=5)
    report = served(simulation, ask("a", a_to_j), ask("new", list(b"0123456789012")), ask("b", list(b"abcdefghiXYZ")))
    assert report.prefix_outcomes == {"hit": 4, "miss_evicted": 4, "miss_sub_block": 1, "miss_diverged": 3}
    assert (report.diverged_at, report.evicted_by) == (9, {"new": 4})
    report = served(Simulation(), ask("a", a_to_j), ask("b", list(b"abcdefghijKL")))
    assert report.prefix_outcomes == {"hit": 8, "miss_sub_block": 2, "miss_cold": 2}
    assert report.diverged_at is None


def test_other_salts_know_nothing_of_each_other():
    simulation = Simulation()
    assert served(simulation, ask("a", A + B), ask("b", A + B, cache_salt="x")).prefix_outcomes == {"miss_cold": 16}
    assert served(simulation, ask("c", A + B, cache_salt="x")).prefix_outcomes == {"hit": 12, "miss_sub_block": 4}


def test_a_fork_reads_its_leaders_prompt_which_is_booked_once():
    simulation = Simulation()
    simulation.receive(ask("a", [*A, *B, 1], 4), ask("a#1", [*A, *B, 1], 4, fork_of="a"))
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.ended["a"].prefix.prefix_outcomes == {"miss_cold": 17}
    assert simulation.published.ended["a#1"].prefix is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "overlap"),
    [(A, 1, False), ([1] * 7, 4, True)],
    ids=["which is full when it is shared", "which a step under way fills"],
)
def test_a_waiting_fork_holds_its_leaders_last_block_until_it_copies_it(prompt, max_tokens, overlap):
    """`check` holds who reads what to the pool, after every step."""
    simulation = Simulation(max_num_seqs=1, overlap=overlap)
    simulation.receive(ask("a", prompt, max_tokens), ask("a#1", prompt, 4, fork_of="a"))
    simulation.drain()
    simulation.check_idle()


def test_a_preempted_request_is_booked_once():
    simulation = Simulation(num_blocks=7)
    simulation.receive(ask("old", [1] * 8, 12), ask("new", [2] * 8, 12))
    simulation.drain()
    simulation.check_idle()
    new = simulation.published.ended["new"]
    assert new.preemptions > 0 and new.prefix.prefix_outcomes == {"miss_cold": 8}


def test_who_never_got_a_place_has_no_report():
    simulation = Simulation(max_num_seqs=1)
    simulation.receive(ask("a", A, 8), ask("b", B))
    simulation.step()
    simulation.receive(Abort("b"))
    simulation.drain()
    assert simulation.published.ended["b"].prefix is None


def test_what_is_known_is_bounded_and_what_is_forgotten_is_counted():
    pool = BlockPool(8, SIZE)
    shadow = ShadowIndex(8, SIZE, remembered=4)
    assert shadow.sizes == [4, 8]  # larger ones are more than it can know
    simulation = Simulation(8)
    simulation.block_observer.shadow = shadow
    for index in range(10):
        served(simulation, ask(f"r{index}", [index] * 9, cache_salt=str(index % 3)))
        assert len(shadow) <= 12
    assert shadow.num_dropped == 20 - 12
    assert sum(record.shadow_evicted_blocks for record in simulation.published.records) == shadow.num_dropped
    assert pool.available == 8


def test_a_salt_is_forgotten_with_its_last_block_or_last_request():
    shadow = ShadowIndex(8, SIZE, remembered=4)
    simulation = Simulation(8)
    simulation.block_observer.shadow = shadow
    for index in range(20):
        served(simulation, ask(f"short{index}", [1, 2], cache_salt=f"a{index}"))
        simulation.receive(ask(f"left{index}", [1] * 9, cache_salt=f"b{index}"), Abort(f"left{index}"))
        simulation.drain()
    assert num_salts(shadow) == 0
    for index in range(20):
        served(simulation, ask(f"long{index}", [index] * 9, cache_salt=f"c{index}"))
    assert len(shadow) == 12 and num_salts(shadow) == 12 / 2, "two blocks each"


def test_sampled_times_are_of_the_clock_and_distances_of_the_blocks_between():
    simulation = Simulation(num_blocks=6)
    served(simulation, ask("a", A))  # one block can be used again, two are cached
    served(simulation, ask("b", B))
    simulation.clock.now_ns += 70_000_000
    served(simulation, ask("a2", A))
    gaps = [gap for record in simulation.published.records for gap in record.reuse_gap_ns]
    assert len(gaps) == 1 and 70_000_000 < gaps[0] < simulation.clock.now_ns
    assert [d for record in simulation.published.records for d in record.reuse_distance_blocks] == [2]
    served(simulation, ask("c", C * 3))
    idle = [ns for record in simulation.published.records for ns in record.evicted_idle_ns]
    age = [ns for record in simulation.published.records for ns in record.evicted_age_ns]
    assert len(idle) == len(age) == simulation.scheduler.pool.evicted_blocks == 4
    assert all(0 <= i <= a for i, a in zip(idle, age, strict=True)) and max(age) > 70_000_000


def test_an_observer_changes_no_token_and_no_block():
    def run(observed: bool) -> tuple[dict, list]:
        simulation = Simulation(num_blocks=9, max_num_batched_tokens=8)
        if not observed:
            simulation.block_observer = BlockObserver()
            simulation.scheduler.block_observer = simulation.scheduler.block_manager.observer = (
                simulation.block_observer
            )
        for index in range(12):
            simulation.receive(ask(f"r{index}", [index % 3] * (5 + index % 7), 5))
            simulation.step()
        simulation.drain()
        counts = [(r.blocks_free, r.blocks_active, r.evicted_blocks, r.slots_written) for r in
                  simulation.published.records]  # fmt: skip
        return simulation.published.tokens, counts

    assert run(True) == run(False)


def test_a_part_behind_a_changing_beginning_is_movable_once_two_prompts_had_it():
    instructions, simulation = [*range(100, 140)], Simulation(num_blocks=256)
    prompts = [[1000 + index, *instructions, *[2000 + index] * 5] for index in range(4)]
    reports = [served(simulation, ask(f"r{index}", prompt)) for index, prompt in enumerate(prompts)]
    assert [report.repeated_tokens for report in reports] == [0, 40, 40, 40]
    assert [report.movable_tokens for report in reports] == [0, 0, 40, 40]
    assert not any(report.prefix_shared_tokens for report in reports)
    salted = served(simulation, ask("other", prompts[0], cache_salt="x"))
    assert (salted.repeated_tokens, salted.movable_tokens) == (0, 0)


def test_reports_of_one_call_add_up():
    one = PrefixReport({"hit": 8, "miss_cold": 1}, 8, None, {}, None, [0, 8], "r7#1", 8, 30, 20)
    two = PrefixReport({"miss_evicted": 4, "miss_diverged": 3}, 4, 4, {"r9": 4}, 70, [0, 4], None, 0, 3, 2)
    both = combined([one, two])
    assert both == PrefixReport(
        {"hit": 8, "miss_cold": 1, "miss_evicted": 4, "miss_diverged": 3},
        12,
        None,
        {"r9": 4},
        70,
        [0, 12],
        "r7",
        8,
        33,
        22,
    )
    assert combined([]) == PrefixReport({}, 0, None, {}, None, [])


def test_one_block_in_so_many_is_sampled():
    assert [ShadowIndex(n, 1).sampled_one_in for n in (1, 511, 512, 4096, 32_768, 10**6)] == [1, 1, 2, 16, 128, 128]
    assert ShadowObserver(BlockPool(4, 1)).shadow.sizes == [2, 4, 8, 16, 32]
