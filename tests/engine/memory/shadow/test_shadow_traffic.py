"""What holds of the shadow index whatever traffic comes, against brute force and against itself."""

from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sojourn.engine.messages import Abort
from sojourn.metrics.memory.prefix_outcomes import PREFIX_OUTCOMES
from tests.engine.memory.shadow.test_shadow import SIZE, ask, served
from tests.engine.simulated import Simulation

# Sequences of few different tokens, so that prefixes meet; the block size is SIZE.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def shared(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Oracle:
    """All sequences that were computed, by salt; what each prompt must be told, from their common prefixes."""

    computed: dict[str, list[list[int]]] = field(default_factory=dict)

    def outcomes(self, prompt: list[int], salt: str) -> tuple[dict[str, int], int, int | None]:
        known = self.computed.get(salt, [])
        lengths = [shared(k, prompt) for k in known]
        furthest = max(lengths, default=0)
        hit = min(furthest, len(prompt) - 1) // SIZE * SIZE
        leaves = furthest < len(prompt) and any(
            length == furthest and len(k) > length for k, length in zip(known, lengths, strict=True)
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


@settings(max_examples=60)
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


@settings(max_examples=60)
@example([([0], 1, "", 0), ([0, 1, 1, 1, 1], 2, "", 0), ([0], 1, "", 2), ([0, 1, 1, 1, 1, 1], 1, "", 0)], 8, False)
@given(
    st.lists(st.tuples(prompts, st.integers(1, 6), st.sampled_from(["", "", "x"]), st.integers(0, 4)), max_size=12),
    st.integers(8, 24), st.booleans(),
)  # fmt: skip
def test_the_source_of_a_prefix_is_an_earlier_request_that_shares_most(requests, num_blocks, prefix_caching):
    """Some run together, some one after the other; the pool may evict, or cache nothing. What a request has generated
    by then counts, as the next turn of a conversation repeats it."""
    simulation = Simulation(num_blocks, prefix_caching=prefix_caching, max_num_batched_tokens=12)
    for index, (prompt, max_tokens, salt, num_steps) in enumerate(requests):
        simulation.receive(ask(f"r{index}", prompt, max_tokens, cache_salt=salt))
        for _ in range(num_steps):
            if simulation.engine.has_work:
                simulation.step()
    simulation.drain()
    for index, (prompt, _, salt, _) in enumerate(requests):
        report = simulation.published.ended[f"r{index}"].prefix
        before = [other if its_salt == salt else [] for other, _, its_salt, _ in requests[:index]]
        remembered = [other for other in before if len(other) >= SIZE or not salt]
        whole = [
            other + simulation.published.tokens[f"r{place}"] if other else [] for place, other in enumerate(before)
        ]
        assert report.prefix_shared_tokens <= max((shared(other, prompt) for other in whole), default=0)
        assert report.prefix_shared_tokens >= max((shared(other, prompt) for other in remembered), default=0)
        if report.prefix_source is None:
            assert report.prefix_shared_tokens == 0
        else:
            source = int(report.prefix_source[1:])
            found = report.prefix_shared_tokens
            assert shared(before[source], prompt) <= found <= shared(whole[source], prompt)


@settings(max_examples=40)
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


EVENTS = (
    "on_lookup", "on_lookup_failed", "on_admit", "on_share", "on_copy", "on_grow", "on_fill", "on_release",
)  # fmt: skip
FATES = ("too_small_below", "lost_below", "filled_ns", "idle_ns", "evicted_ns", "evicted_by")


def played(acts, num_blocks: int, caching: bool, overlap: bool, book=None):
    """The simulation, the prompts' lengths, and the ids of forks. With `book` nobody looks at it, and the index learns
    of each event "at_once", or "after each step"."""
    simulation = Simulation(num_blocks, prefix_caching=caching, overlap=overlap, max_num_batched_tokens=12)
    observer = simulation.block_observer
    if book is not None:
        simulation.check = lambda: None  # which would flush
    for event in EVENTS if book == "at_once" else ():
        later = getattr(observer, event)
        setattr(observer, event, lambda *told, later=later: (later(*told), observer.flush()))
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


@settings(max_examples=60)
@given(actions, st.integers(6, 24), st.booleans(), st.booleans())
def test_what_is_booked_later_is_booked_as_if_it_had_been_at_once(acts, num_blocks, caching, overlap):
    told = []
    for book in ("at_once", "after each step"):
        simulation = played(acts, num_blocks, caching, overlap, book)[0]
        published = simulation.published
        nodes = simulation.block_observer.shadow._nodes
        blocks = {key: [getattr(node, fate) for fate in FATES] for key, node in nodes.items()}
        fields = ("reuse_gap_ns", "reuse_distance_blocks", "evicted_age_ns", "evicted_idle_ns")
        times = [[ns for record in published.records for ns in getattr(record, field)] for field in fields]
        forgotten = sum(record.shadow_evicted_blocks for record in published.records)
        told.append(({name: ended.prefix for name, ended in published.ended.items()}, blocks, times, forgotten))
    assert told[0] == told[1]


@settings(max_examples=60)
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
