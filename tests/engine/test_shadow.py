"""What became of every prompt token, against a brute force over token lists; and the shadow index against the pool."""

from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.block_pool import BlockPool
from engine.memory.journal import NoJournal, ShadowJournal
from engine.memory.shadow import Shadow
from engine.messages import Abort, Submit
from engine.sampling import SamplingParams
from metrics.prefix import PREFIX_OUTCOMES, PrefixReport, combined
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
    assert report == PrefixReport({"miss_cold": 16}, 0, None, {}, None, [0] * 5)


def test_blocks_that_are_cached_hit_and_what_is_known_behind_them_is_below_a_block():
    report = served(Simulation(), ask("a", A + B), ask("b", A + B))
    assert report.prefix_outcomes == {"hit": 12, "miss_sub_block": 4}  # the last token is always computed
    assert (report.infinite_hit_tokens, report.diverged_at) == (12, None)
    assert report.resized_hit_tokens == [12] * 5


def test_a_conversation_that_goes_on_is_new_behind_its_end():
    simulation = Simulation()
    served(simulation, ask("a", [*A, 9, 9], 2))  # the first of its two output tokens is computed, too
    told = simulation.published.tokens["a"]
    report = served(simulation, ask("b", [*A, 9, 9, *told, 5, 5, 5, 5]))
    assert report.prefix_outcomes == {"hit": 8, "miss_sub_block": 3, "miss_cold": 5}
    assert report.diverged_at is None


def test_a_conversation_that_leaves_a_known_one_diverges_at_that_token():
    report = served(Simulation(), ask("a", A + B + C), ask("b", [*A, *B[:6], 7, *C]))
    assert report.prefix_outcomes == {"hit": 12, "miss_sub_block": 2, "miss_diverged": 9}
    assert report.diverged_at == 14


def test_a_beginning_of_less_than_a_block_is_below_a_block_and_the_rest_is_cold():
    report = served(Simulation(), ask("a", A + B), ask("b", [1, 1, 1, *B]))
    assert report.prefix_outcomes == {"miss_sub_block": 3, "miss_cold": 8}
    assert report.diverged_at == 3


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


def test_the_last_block_of_a_prompt_is_computed_by_everybody_and_so_in_flight_for_nobody():
    simulation = Simulation()
    simulation.receive(ask("a", A + B), ask("b", A + B))
    simulation.drain()
    assert simulation.published.ended["b"].prefix.prefix_outcomes == {"miss_in_flight": 12, "miss_cold": 4}
    simulation.check_idle()


def test_what_the_head_of_the_queue_waits_to_read_is_used_in_the_shadow_as_it_is_in_the_pool():
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


# Sequences of few different tokens, so that prefixes meet; the block size is SIZE.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@dataclass
class Oracle:
    """All sequences that were computed, by salt; what each prompt must be told, from their common prefixes."""

    computed: dict[str, list[list[int]]] = field(default_factory=dict)

    def outcomes(self, prompt: list[int], salt: str) -> tuple[dict[str, int], int, int | None]:
        known = self.computed.get(salt, [])
        shared = [next((i for i, (a, b) in enumerate(zip(k, prompt, strict=False)) if a != b), None) for k in known]
        shared = [min(len(k), len(prompt)) if s is None else s for k, s in zip(known, shared, strict=True)]
        furthest = max(shared, default=0)
        hit = min(furthest, len(prompt) - 1) // SIZE * SIZE
        leaves = furthest < len(prompt) and any(
            s == furthest and len(k) > s for k, s in zip(known, shared, strict=True)
        )
        told = {
            "hit": hit, "miss_sub_block": furthest - hit,
            "miss_diverged" if leaves and hit else "miss_cold": len(prompt) - furthest,
        }  # fmt: skip
        outcomes = {outcome: tokens for outcome, tokens in told.items() if tokens}
        return outcomes, hit, furthest if leaves and furthest else None

    def compute(self, tokens: list[int], salt: str) -> None:
        known = self.computed.setdefault(salt, [])
        if len(tokens) >= SIZE or not salt or any(len(other) >= SIZE for other in known):
            known.append(tokens)  # else nothing of this salt is a block yet


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(1, 6), st.sampled_from(["", "", "x"])), min_size=1, max_size=12))
def test_without_eviction_every_token_is_told_what_brute_force_says(requests):
    simulation, oracle = Simulation(num_blocks=512), Oracle()
    for index, (prompt, max_tokens, salt) in enumerate(requests):
        name = f"r{index}"
        outcomes, infinite, diverged_at = oracle.outcomes(prompt, salt)
        report = served(simulation, ask(name, prompt, max_tokens, cache_salt=salt))
        assert report.prefix_outcomes == outcomes
        assert (report.infinite_hit_tokens, report.diverged_at) == (infinite, diverged_at)
        oracle.compute(prompt + simulation.published.tokens[name][:-1], salt)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 6)), min_size=1, max_size=12), st.integers(5, 16), st.booleans(),
)  # fmt: skip
def test_with_eviction_an_infinite_cache_hits_what_brute_force_says(requests, num_blocks, prefix_caching):
    simulation, oracle = Simulation(num_blocks=num_blocks, prefix_caching=prefix_caching), Oracle()
    for index, (prompt, max_tokens) in enumerate(requests):
        name = f"r{index}"
        _, infinite, diverged_at = oracle.outcomes(prompt, "")
        report = served(simulation, ask(name, prompt, max_tokens))
        told = report.prefix_outcomes
        assert (report.infinite_hit_tokens, report.diverged_at) == (infinite, diverged_at)
        assert told.get("hit", 0) == simulation.published.ended[name].cached_tokens
        assert told.get("hit", 0) + told.get("miss_evicted", 0) + told.get("miss_disabled", 0) == infinite
        assert sum(told.values()) == len(prompt)
        oracle.compute(prompt + simulation.published.tokens[name][:-1], "")


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), prompts, st.integers(1, 9), st.sampled_from(["", "", "", "x"]),
            st.sampled_from(["", "", "", "scored", "fork"]),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.just(("step",)),
    ),
    min_size=1, max_size=60,
)  # fmt: skip


def played(acts, num_blocks: int, caching: bool, overlap: bool, book=None):
    """The simulation, the prompts' lengths, and who was a fork. `book`: it is not looked at, and books at_once, or
    after a few events, or late."""
    simulation = Simulation(num_blocks, prefix_caching=caching, overlap=overlap, max_num_batched_tokens=12)
    journal = simulation.journal
    if book is not None:
        simulation.check = lambda: None  # which would book
    for event in ("grew", "filled") if book == "at_once" else ():
        later = getattr(journal, event)
        setattr(journal, event, lambda *told, later=later: (later(*told), journal._settle()))
    lengths: dict[str, int] = {}
    forks, last = set(), None
    for act in acts:
        if act[0] == "ask":
            _, prompt, max_tokens, salt, kind = act
            name = f"r{len(lengths)}"
            if kind == "fork" and last is not None:
                prompt, salt, leader = last
                forks.add(name)
                more = {"fork_of": leader}
            else:
                last, more = (prompt, salt, name), {"prompt_logprobs": 0 if kind == "scored" else None}
            lengths[name] = len(prompt)
            simulation.receive(ask(name, prompt, max_tokens, cache_salt=salt, **more))
        elif act[0] == "abort":
            simulation.receive(Abort(f"r{act[1]}"))
            simulation.check()
        elif simulation.engine.has_work:
            simulation.step()
    simulation.drain()
    simulation.check_idle()
    return simulation, lengths, forks


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(6, 24), st.booleans(), st.booleans())
def test_what_is_booked_later_is_booked_as_if_it_had_been_at_once(acts, num_blocks, caching, overlap):
    told = []
    for book, events in (("at_once", 1), ("after a few events", 3), ("late", 10**9)):
        with mock.patch("engine.memory.journal.MOST_LATER", events):
            simulation = played(acts, num_blocks, caching, overlap, book)[0]
        published, fates = simulation.published, ("level", "floor", "filled_ns", "idle_ns", "evicted_ns", "evicted_by")
        blocks = {
            key: [getattr(node, fate) for fate in fates] for key, node in simulation.journal.shadow._known.items()
        }
        fields = ("reuse_gap_ns", "reuse_distance_blocks", "evicted_age_ns", "evicted_idle_ns")
        times = [[ns for record in published.records for ns in getattr(record, field)] for field in fields]
        forgotten = sum(record.forgotten_blocks for record in published.records)
        told.append(({name: ended.prefix for name, ended in published.ended.items()}, blocks, times, forgotten))
    assert told[0] == told[1] == told[2]


@settings(max_examples=60, deadline=None)
@given(actions, st.integers(6, 24), st.booleans(), st.booleans())
def test_whatever_happens_the_books_close_and_the_pools_own_size_is_the_pool(acts, num_blocks, caching, overlap):
    """After every third step: `Simulation.check` holds the shadow's blocks to the pool's; slots to a brute force."""
    simulation, lengths, forks = played(acts, num_blocks, caching, overlap)
    for name, ended in simulation.published.ended.items():
        report = ended.prefix
        if report is None:
            assert ended.reason == "abort" or name in forks
            continue
        told = report.prefix_outcomes
        assert set(told) <= set(PREFIX_OUTCOMES) and sum(told.values()) == lengths[name]
        assert told.get("hit", 0) == ended.cached_tokens
        assert told.get("hit", 0) + told.get("miss_evicted", 0) + told.get("miss_disabled", 0) == (
            report.infinite_hit_tokens
        )
        resized = report.resized_hit_tokens
        assert resized == sorted(resized) and resized[-1] <= report.infinite_hit_tokens
        if caching:
            assert resized[1] == told.get("hit", 0), "the curve at its own size is not what happened"
        assert sum(report.evicted_by.values()) == told.get("miss_evicted", 0) and "" not in report.evicted_by


def test_what_is_known_is_bounded_and_what_is_forgotten_is_counted():
    pool = BlockPool(8, SIZE)
    shadow = Shadow(8, SIZE, remembered=4)
    assert shadow.sizes == [4, 8]  # larger ones are more than it can know
    simulation = Simulation(8)
    simulation.journal.shadow = shadow
    for index in range(10):
        served(simulation, ask(f"r{index}", [index] * 9, cache_salt=str(index % 3)))
        assert len(shadow) <= 12
    assert shadow.forgotten == 20 - 12
    assert sum(record.forgotten_blocks for record in simulation.published.records) == shadow.forgotten
    assert pool.available == 8


def test_a_salt_is_forgotten_with_its_last_block_and_one_that_never_had_a_block_with_its_last_request():
    shadow = Shadow(8, SIZE, remembered=4)
    simulation = Simulation(8)
    simulation.journal.shadow = shadow
    for index in range(20):
        served(simulation, ask(f"short{index}", [1, 2], cache_salt=f"a{index}"))
        simulation.receive(ask(f"left{index}", [1] * 9, cache_salt=f"b{index}"), Abort(f"left{index}"))
        simulation.drain()
    assert shadow.num_salts == 0
    for index in range(20):
        served(simulation, ask(f"long{index}", [index] * 9, cache_salt=f"c{index}"))
    assert len(shadow) == 12 and shadow.num_salts == 12 / 2, "two blocks each"


def test_sampled_times_and_distances_are_those_of_the_clock_and_of_the_blocks_between():
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


def test_a_journal_changes_no_token_and_no_block():
    def run(journal: bool) -> tuple[dict, list]:
        simulation = Simulation(num_blocks=9, max_num_batched_tokens=8)
        if not journal:
            simulation.scheduler.journal = simulation.scheduler.placement.journal = NoJournal()
            simulation.journal.check = lambda cached: None
        for index in range(12):
            simulation.receive(ask(f"r{index}", [index % 3] * (5 + index % 7), 5))
            simulation.step()
        simulation.drain()
        counts = [(r.blocks_free, r.blocks_active, r.evicted_blocks, r.slots_written) for r in
                  simulation.published.records]  # fmt: skip
        return simulation.published.tokens, counts

    assert run(True) == run(False)


def test_reports_of_one_call_add_up():
    one = PrefixReport({"hit": 8, "miss_cold": 1}, 8, None, {}, None, [0, 8])
    two = PrefixReport({"miss_evicted": 4, "miss_diverged": 3}, 4, 4, {"r9": 4}, 70, [0, 4])
    both = combined([one, two])
    assert both == PrefixReport(
        {"hit": 8, "miss_cold": 1, "miss_evicted": 4, "miss_diverged": 3}, 12, None, {"r9": 4}, 70, [0, 12]
    )
    assert combined([]) == PrefixReport({}, 0, None, {}, None, [])


def test_one_block_in_so_many_is_sampled():
    assert [Shadow(n, 1).sampled_one_in for n in (1, 511, 512, 4096, 32_768, 10**6)] == [1, 1, 2, 16, 128, 128]
    assert ShadowJournal(BlockPool(4, 1)).shadow.sizes == [2, 4, 8, 16, 32]
