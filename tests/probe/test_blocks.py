"""The recorded cache of blocks: hits, causes of misses and evictors are those of the cache that was recorded."""

import random
from collections import Counter
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from sojourn.engine.messages import Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.interop.probe.folder import import_probe, run_of
from sojourn.interop.probe.records import LENGTH, MAGIC
from sojourn.interop.probe.stream import read_streams
from sojourn.interop.probe.tail import ProbeTail
from sojourn.live.kv_lens.of_run import lens_of_run
from sojourn.metrics.memory.branches import branches_of
from sojourn.metrics.memory.miss_ratio import miss_ratio_curve
from sojourn.metrics.memory.prefix_outcomes import RATIOS
from tests.engine.simulated import CheckedModel, Simulation
from tests.further import further
from tests.probe import foreign_vllm_blocks as foreign
from tests.probe.foreign_vllm import config, install
from tests.probe.test_scheduler import made, served

SIZE = foreign.SIZE


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SOJOURN_PROBE", str(tmp_path / "probe"))
    install(monkeypatch, foreign.Scheduler, foreign.AsyncScheduler)
    return tmp_path / "probe"


def prompts(seed: int, count: int = 60, beginnings: int = 8) -> list[list[int]]:
    """Few beginnings of one to five blocks, and ends of their own that fill no last block."""
    dice = random.Random(seed)
    heads = [[dice.randrange(900) for _ in range(SIZE * dice.randint(1, 5))] for _ in range(beginnings)]
    return [
        dice.choice(heads) + [dice.randrange(900) for _ in range(dice.choice([3, 5, 17, 40]))] for _ in range(count)
    ]


def requests_of(texts: list[list[int]], outputs: int = 3) -> list[foreign.Request]:
    return [foreign.Request(f"cmpl-r{n}-0-{n:08x}", text, outputs) for n, text in enumerate(texts)]


def one_by_one(scheduler, requests) -> None:
    for request in requests:
        scheduler.add_request(request)
        while scheduler.requests:
            scheduler.update_from_output(scheduler.schedule(), None)
    scheduler.shutdown()


def rows_of(folder: Path):
    run = import_probe(folder)
    rows = run.table("requests").set_index("request_id", drop=False)
    assert (rows.prefix_outcomes.map(lambda cell: sum(cell.values())) == rows.prompt_tokens).all()
    return run, rows


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_outcomes_sum_to_prompts_and_hits_are_the_servers(folder, seed, depth):
    scheduler = made(blocks=40, max_num_seqs=4)
    served(scheduler, requests_of(prompts(seed)), seed=seed, depth=depth)
    _run, rows = rows_of(folder)
    first = {}
    for name, tokens in scheduler.kv_cache_manager.lookups:
        first.setdefault(name, tokens)
    assert rows.prefix_outcomes.map(lambda cell: cell.get("hit", 0)).to_dict() == first
    assert sum(first.values()) > 0 and (rows.infinite_hit_tokens >= rows.cached_tokens).all()
    evicted = rows.prefix_outcomes.map(lambda cell: cell.get("miss_evicted", 0))
    assert (rows.infinite_hit_tokens == rows.cached_tokens + evicted).all() and evicted.sum() > 0
    assert (rows.evicted_by.map(lambda cell: sum(cell.values())) <= evicted).all()


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_what_an_infinite_cache_and_other_sizes_hit_is_what_such_servers_hit(folder, seed, tmp_path, monkeypatch):
    """Oracle: the same prompts one by one, in caches of other sizes."""
    texts, blocks = prompts(seed, count=150, beginnings=14), 24
    one_by_one(made(blocks=blocks), requests_of(texts))
    _, rows = rows_of(folder)
    for at, ratio in enumerate((*RATIOS, 1000.0)):
        other = foreign.Scheduler(config(blocks=int(ratio * blocks)))
        one_by_one(other, requests_of(texts))
        hits = [tokens for _, tokens in other.kv_cache_manager.lookups]
        told = rows.infinite_hit_tokens if ratio == 1000 else rows.resized_hit_tokens.map(lambda cell, at=at: cell[at])
        if ratio >= 1 or int(ratio * blocks) >= max(-(-len(text + [0] * 3) // SIZE) for text in texts) + 2:
            # A block of a sequence that was never full does not stay, and takes room while its request runs
            assert sum(told) == pytest.approx(sum(hits), rel=0.03 if ratio < 1 else 0.02), ratio
    assert miss_ratio_curve(rows)[1].hit_tokens == pytest.approx(rows.cached_tokens.sum(), rel=0.02)


def test_each_cause_of_a_miss(folder):
    base = list(range(SIZE * 3))
    texts = [
        [*base, 1, 2],  # r0: never seen
        base + [7] * SIZE,  # r1: three blocks of r0, which goes on otherwise
        list(range(500, 505 + SIZE * 9)),  # r2: needs the room of all
        [*base, 1, 2],  # r3: was there, evicted by r2
        [*base, 1, 2],  # r4: is there; the rest is less than a block
        base[: 2 * SIZE],  # r5: known whole: the last block is computed for its last token
        base[:SIZE] + [9] * SIZE,  # r6: leaves a known prompt behind the first block
    ]
    requests = requests_of(texts, outputs=1)
    requests.append(foreign.Request("cmpl-r7-0-00000007", [*base, 3], 1, reads=False))
    scheduler = made(blocks=10, max_num_batched_tokens=512)
    one_by_one(scheduler, requests)
    _, rows = rows_of(folder)
    names = [request.request_id for request in requests]
    told = [dict(rows.prefix_outcomes[name]) for name in names]
    whole = SIZE * 3
    assert told == [
        {"miss_cold": whole + 2}, {"hit": whole, "miss_diverged": SIZE}, {"miss_cold": 9 * SIZE + 5},
        {"miss_evicted": whole, "miss_sub_block": 2}, {"hit": whole, "miss_sub_block": 2},
        {"hit": SIZE, "miss_sub_block": SIZE}, {"hit": SIZE, "miss_diverged": SIZE},
        {"miss_disabled": whole, "miss_diverged": 1},
    ]  # fmt: skip
    assert rows.evicted_by[names[3]] == {names[2]: whole} and rows.evicted_ago_ns[names[3]] > 0
    assert rows.diverged_at[names[6]] == SIZE and rows.prefix_source[names[6]] == names[0]
    assert rows.prefix_source[names[4]] == names[0] and rows.prefix_shared_tokens[names[4]] == whole + 2
    assert rows.prefix_shared_tokens[names[5]] == 2 * SIZE, "a whole prompt may be shared"
    assert len(rows.prompt_block_hashes[names[4]]) == 3 and len(set(rows.prompt_block_hashes[names[4]])) == 3


class SameTokens(CheckedModel):
    """Our engine with the outputs of the foreign one."""

    def tokens(self, item):
        length = item.past_tokens + item.new_tokens
        return [1000 + length * 7919 % 50_000] if item.samples else []


def by_our_engine(texts: list[list[int]], blocks: int, outputs: int, *, caches: bool = True) -> list:
    simulation = Simulation(blocks, SIZE, caches, device=SameTokens, max_num_batched_tokens=512)
    simulation.check = lambda: None
    for number, text in enumerate(texts):
        params = SamplingParams(max_tokens=outputs, temperature=0, ignore_eos=True)
        simulation.receive(Submit(f"r{number}", text, params, 0))
        simulation.drain()
    simulation.engine.flush()
    return [simulation.published.ended[f"r{number}"].prefix for number in range(len(texts))]


def conversations(seed: int) -> list[list[int]]:
    """Turns that go on with the answer, go on otherwise, are asked again, end early, or are new."""
    dice, histories, made = random.Random(seed), [[]], []
    for _ in range(90):
        history = dice.choice(histories)
        text = history[: dice.choice([len(history), len(history), dice.randint(0, len(history))])]
        text = text + [dice.randrange(4) for _ in range(dice.choice([0, 1, 7, 16, 30]))] or [1]
        made.append(text)
        answer = list(text)
        for _ in range(3):
            answer.append(1000 + len(answer) * 7919 % 50_000)
        histories.append(answer)
    return made


@pytest.mark.parametrize("caches", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("blocks", [4000, 40])
@pytest.mark.parametrize("seed", [0, *further(1, 2, 3, 4, 5)])
def test_miss_columns_are_those_of_our_engine(folder, seed, blocks, caches):
    """Oracle: our engine's own shadow index, which sees every token, with the same prompts one by one."""
    texts = [text for text in conversations(seed) if len(text) < 400]
    requests = requests_of(texts)
    one_by_one(made(blocks=blocks, max_num_batched_tokens=512, caches=caches), requests)
    _, rows = rows_of(folder)
    ours = by_our_engine(texts, blocks, 3, caches=caches)
    told = [rows.loc[request.request_id] for request in requests]
    sequences = {request.request_id: request.all_token_ids[:-1] for request in requests}
    for number, (row, report) in enumerate(zip(told, ours, strict=True)):
        assert row.infinite_hit_tokens == report.infinite_hit_tokens, number
        assert row.prefix_shared_tokens == report.prefix_shared_tokens, number
        assert (None if pd.isna(row.diverged_at) else row.diverged_at) == report.diverged_at, number
        if blocks == 4000 or not caches:  # else both evict, and one of them stores a block twice
            assert dict(row.prefix_outcomes) == report.prefix_outcomes, number
        assert pd.isna(row.prefix_source) == (report.prefix_source is None)
        if report.prefix_source is not None:  # of several that share as much, any one
            shared = [a == b for a, b in zip(texts[number], sequences[row.prefix_source], strict=False)]
            assert [*shared, False].index(False) == row.prefix_shared_tokens, number
    assert sum("miss_diverged" in row.prefix_outcomes for row in told) > 5
    assert sum("miss_sub_block" in row.prefix_outcomes for row in told) > 10


def test_marks_beyond_the_allowance_are_left_out(folder, monkeypatch):
    monkeypatch.setattr("sojourn_probe.token_marks.BURST_TOKENS", 100)
    monkeypatch.setattr("sojourn_probe.token_marks.SHARE", 1e-9)
    base = list(range(SIZE * 2))
    texts = [base + [1] * 40, base + [1] * 8 + [2] * 40, base + [1] * 8 + [3] * 40]
    one_by_one(made(blocks=100, max_num_batched_tokens=512), requests_of(texts))
    _, rows = rows_of(folder)
    last = rows.loc[requests_of(texts)[-1].request_id]
    assert last.diverged_at == 2 * SIZE and last.infinite_hit_tokens == 2 * SIZE, "at the beginning of a block"


def marks_in(file: Path) -> list[int]:
    """Of the first marked prompt."""
    content, at = file.read_bytes(), len(MAGIC)
    while True:
        (size,) = LENGTH.unpack_from(content, at)
        tag, *values = msgspec.msgpack.decode(content[at + LENGTH.size : at + LENGTH.size + size])
        if tag == "kv%":
            return values[2]
        at += LENGTH.size + size


def test_a_tail_knows_what_was_stored_before_its_window(folder):
    """A watch reads the last seconds only, and says the same of their misses."""
    served(made(blocks=40, max_num_seqs=4), requests_of(prompts(3, count=120)), seed=3)
    whole = import_probe(folder).table("requests").set_index("request_id")
    keep_s = 0.2 * (whole.finished_ns.max() - whole.arrived_ns.min()) / 1e9
    streams = ProbeTail(folder, keep_s).read()
    rows = run_of(folder, streams)[1]["requests"].to_pandas(maps_as_pydicts="strict").set_index("request_id")
    assert 10 < len(rows) < 100 and any("miss_evicted" in cell for cell in rows.prefix_outcomes)
    for name in ("prefix_outcomes", "infinite_hit_tokens", "prefix_shared_tokens", "prompt_block_hashes"):
        assert [*map(str, rows[name])] == [*map(str, whole.loc[rows.index, name])], name


def test_known_blocks_are_bounded(folder, monkeypatch):
    monkeypatch.setattr("sojourn.interop.probe.prefixes.REMEMBERED", 60)
    one_by_one(made(blocks=40), requests_of(prompts(3, count=80)))
    (stream,) = read_streams(folder)
    found = stream.prefixes
    assert len(found._known) <= 60 and len(found._marks) <= 120
    held = [block for block, node in found._known.items() if node.is_held]
    assert 20 < len(held) <= 40, "what is held is never forgotten"
    branches = sum(len(branches_of(node.followed_by)) for node in [found._root, *found._known.values()])
    assert len(found._writers) <= branches + 60


def test_marks_are_of_no_use_outside_their_process(folder):
    text = [424242] * 40
    for _ in range(2):  # a process each time, as far as the key goes
        one_by_one(made(blocks=40), requests_of([text], outputs=1))
    first, second = (marks_in(file) for file in sorted(folder.glob("*.probe")))
    assert len(first) == len(set(first)) == 40, "the same token has another mark in each place"
    assert not set(first) & set(second)
    content = b"".join(file.read_bytes() for file in folder.glob("*.probe"))
    assert (424242).to_bytes(4, "big") not in content


def test_a_reset_cache_knows_nothing(folder):
    scheduler = made(blocks=40)
    request, again = requests_of([list(range(50)), list(range(50))], outputs=1)
    scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), None)
    assert scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    one_by_one(scheduler, [again])
    run, rows = rows_of(folder)
    assert dict(rows.prefix_outcomes[again.request_id]) == {"miss_cold": 50}
    assert list(run.table("kv_events").kind) == ["stored", "cleared", "stored"]


def test_lens_of_the_folder_has_events_and_curve(folder):
    scheduler = made(blocks=30, max_num_seqs=3)
    served(scheduler, requests_of(prompts(7, count=80)), seed=7)
    lens = lens_of_run(import_probe(folder))
    assert lens.source == "records" and lens.pool_blocks == 30 and not lens.warnings
    assert {"age_when_evicted", "idle_when_evicted", "idle_before_reuse", "evicted_before_needed"} == set(lens.times)
    pool = lens.pools[0]
    assert pool.held == sum(map(len, scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block.values()))
    taken = Counter(each.name for each in lens.takers if each.evicted_blocks)
    assert taken and all(name.startswith("cmpl-r") for name in taken)


def test_a_pool_of_another_version_is_left_alone(folder, monkeypatch, caplog):
    monkeypatch.setattr(foreign.BlockPool, "cache_full_blocks", lambda self, request, blocks: None)
    monkeypatch.setattr(foreign.KVCacheManager, "allocate_slots", lambda self, request, num_new_tokens, *_: [])
    scheduler = made(blocks=40)
    one_by_one(scheduler, requests_of([[1] * 20], outputs=1))
    run = import_probe(folder)
    assert any("is not seen" in each for each in run.meta()["probe"]["unseen"])
    assert run.table("requests").prefix_outcomes.map(bool).sum() == 0


def test_a_fault_of_the_record_of_blocks_leaves_server_and_steps_alone(folder, monkeypatch, caplog):
    from sojourn_probe.vllm_blocks import BlockProbe

    scheduler = made(blocks=40)
    monkeypatch.setattr(BlockProbe, "_store", lambda *_: 1 / 0)
    one_by_one(scheduler, requests_of(prompts(1, count=10)))
    assert caplog.text.count("no longer records blocks after a fault of its own") == 1
    run = import_probe(folder)
    assert len(run.table("requests")) == 10 and len(run.table("steps")) >= 10


def test_a_record_that_cannot_be_written_is_counted(folder):
    scheduler = made(blocks=40)
    scheduler._probe.writer.put(lambda: 1 / 0)
    one_by_one(scheduler, requests_of(prompts(1, count=3)))
    assert import_probe(folder).meta()["probe"]["dropped_records"] == 1
