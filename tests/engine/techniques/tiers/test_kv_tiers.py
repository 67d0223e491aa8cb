"""KV tiers with real tensors and files: the same greedy tokens, whatever happens to the blocks on the way."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.techniques.tiers.block_format import HEADER, BlockFormat
from sojourn.engine.techniques.tiers.disk import Disk
from sojourn.engine.techniques.tiers.host_slots import slot_sizes
from sojourn.engine.techniques.tiers.medium_store import MediumStore
from sojourn.metrics.errors import ModelError
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.memory.audits import audit_tiers
from tests.engine.traffic import copied_and_loaded, given_up_for_loads

GENERATOR = random.Random(5)
SHARED = [GENERATOR.randrange(300) for _ in range(200)]
PROMPTS = [SHARED[: GENERATOR.randrange(60, 200)] + [GENERATOR.randrange(300) for _ in range(9)] for _ in range(10)]
PROMPTS += [[GENERATOR.randrange(300) for _ in range(90)] for _ in range(4)] + PROMPTS[:3]


def serve(folder, prompts=PROMPTS, at_once: int = 3, **settings):
    """The tokens of all prompts, a few at a time, and the engine, which is still open."""
    engine, published = make_engine(folder, **settings)
    for begin in range(0, len(prompts), at_once):
        some = prompts[begin : begin + at_once]
        hand_over(engine, [submit(f"r{begin + index}", prompt, 8) for index, prompt in enumerate(some)])
        drain(engine)
    if engine.scheduler.technique("tiers") is not None:
        audit_tiers(engine.scheduler.technique("tiers").tiers)
    return [published.tokens[f"r{index}"] for index in range(len(prompts))], published, engine


def loaded(published) -> dict[str, int]:
    sums: dict[str, int] = {}
    for ended in published.ended.values():
        for tier, tokens in (ended.kv_load.loaded_tokens if ended.kv_load else {}).items():
            sums[tier] = sums.get(tier, 0) + tokens
    return sums


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


@pytest.fixture(scope="module")
def expected(checkpoints):
    return serve(checkpoints["llama"])[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_host_gib": 1e-3},
        {"kv_host_gib": 1e-3, "overlap": "on", "kv_store_policy": "evict"},
        {"kv_host_gib": 1e-4, "kv_store_policy": "reuse"},
        {"kv_host_gib": 1e-3, "num_kv_blocks": 20, "max_num_seqs": 3, "kv_store_policy": "evict"},  # with preemptions
        {"kv_host_gib": 1e-3, "attention_backend": "torch", "fused_operations": "off"},
    ],
    ids=["fill", "overlap-evict", "tiny-reuse", "preemptions", "torch"],
)
def test_a_tier_in_host_memory_changes_no_token(checkpoints, expected, settings):
    tokens, published, _ = serve(checkpoints["llama"], **({"num_kv_blocks": 24} | settings))
    assert tokens == expected
    if settings["kv_host_gib"] == 1e-3:
        assert loaded(published).get("host", 0) > 0, "the pool of the device was too large for this test"
        assert sum(record.tier_loaded_bytes.get("host", 0) for record in published.records) > 0


def test_a_fork_reads_what_its_leader_wrote_where_a_load_takes_that_block_at_once(checkpoints):
    roomy, expected = make_engine(checkpoints["llama"])
    tight = {"num_kv_blocks": 6, "max_num_seqs": 2, "max_model_len": 64}
    engine, published = make_engine(checkpoints["llama"], kv_host_gib=1e-3, **tight)
    plans, launch = [], engine.runner.launch
    engine.runner.launch = lambda plan: plans.append(plan) or launch(plan)
    for messages in copied_and_loaded(engine.runner.config.block_size):
        for each in (roomy, engine):
            hand_over(each, messages)
            drain(each, check=True)
    assert any(given_up_for_loads(plan) for plan in plans), "the case did not come up"
    assert published.tokens == expected.tokens


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_block_in_codes_keeps_its_scales(checkpoints, kv_cache_dtype):
    settings = {"num_kv_blocks": 24, "kv_cache_dtype": kv_cache_dtype}
    plain = serve(checkpoints["llama"], **settings)[0]
    tokens, published, _ = serve(checkpoints["llama"], kv_host_gib=1e-3, **settings)
    assert tokens == plain and loaded(published)["host"] > 0


def test_a_latent_cache_is_stored_too(checkpoints):
    plain = serve(checkpoints["deepseek-v3"], PROMPTS[7:], num_kv_blocks=24)[0]
    tokens, published, _ = serve(checkpoints["deepseek-v3"], PROMPTS[7:], num_kv_blocks=24, kv_host_gib=1e-3)
    assert tokens == plain and loaded(published)["host"] > 0


def test_a_disk_is_warm_after_a_restart_and_belongs_to_one_model(checkpoints, expected, tmp_path):
    settings = {"kv_disk_path": tmp_path, "kv_host_gib": 1e-3}
    tokens, _, engine = serve(checkpoints["llama"], **settings)
    engine.close()
    assert tokens == expected and len(block_files(tmp_path)) > 20
    tokens, published, engine = serve(checkpoints["llama"], **settings)
    engine.close()
    assert tokens == expected and loaded(published)["disk"] > 100
    first = published.ended["r0"]
    assert first.prefix.prefix_outcomes["hit_disk"] == first.kv_load.loaded_tokens["disk"] == first.cached_tokens
    assert first.kv_load.load_decision == "load" and first.kv_load.load_ns > 0
    for other in ({"kv_cache_dtype": "fp8"}, {"block_size": 8}, {"weights": "int8"}):
        _, published, engine = serve(checkpoints["llama"], PROMPTS[:1], **settings, **other)
        engine.close()
        assert not loaded(published), f"with {other} the files are of another model"
    _, published, engine = serve(checkpoints["qwen2"], PROMPTS[:1], **settings)
    engine.close()
    assert not loaded(published)


@pytest.mark.parametrize("damage", ["flipped", "cut", "another key", "gone"])
def test_a_damaged_file_is_a_counted_miss(checkpoints, expected, tmp_path, damage, caplog):
    settings = {"kv_disk_path": tmp_path, "kv_host_gib": 1e-3}
    serve(checkpoints["llama"], **settings)[2].close()
    engine, published = make_engine(checkpoints["llama"], **settings)  # it has read the headers
    files = block_files(tmp_path)
    contents = files[0].read_bytes()
    for file in files:
        if damage == "flipped":
            whole = bytearray(file.read_bytes())
            whole[HEADER.size + 77] ^= 1
            file.write_bytes(whole)
        elif damage == "cut":
            os.truncate(file, 1000)
        elif damage == "another key" and file != files[0]:
            file.write_bytes(contents)
        elif damage == "gone":
            file.unlink()
    for index, prompt in enumerate(PROMPTS[:4]):
        hand_over(engine, [submit(f"r{index}", prompt, 8)])
        drain(engine)
    assert [published.tokens[f"r{index}"] for index in range(4)] == expected[:4]
    assert sum(record.tier_failures.get("disk", 0) for record in published.records) > 0
    assert "the tokens are computed instead" in caplog.text
    engine.close()


def test_the_index_of_a_restart_skips_what_is_not_whole(checkpoints, tmp_path):
    settings = {"kv_disk_path": tmp_path, "kv_host_gib": 1e-3}
    serve(checkpoints["llama"], **settings)[2].close()
    files = block_files(tmp_path)
    os.truncate(files[0], 10)
    files[1].write_bytes(b"y" * files[1].stat().st_size)
    part = files[2].with_suffix(".part")
    part.write_bytes(b"half")
    engine, _ = make_engine(checkpoints["llama"], **settings)
    assert len(engine.scheduler.technique("tiers").tiers.slow[0].index) == len(files) - 2
    assert not part.exists()
    engine.close()


def test_the_size_of_the_disk_tier_is_kept(checkpoints, expected, tmp_path):
    engine, _ = make_engine(checkpoints["llama"])
    block_bytes = sum(slot_sizes([engine.runner.eager.kv_cache.values])) + HEADER.size
    for blocks in (1, 7):
        settings = {"kv_disk_path": tmp_path / str(blocks), "kv_disk_gib": (blocks + 0.5) * block_bytes / 2**30}
        tokens, _, engine = serve(checkpoints["llama"], **settings)
        engine.close()
        assert tokens == expected
        assert len(block_files(tmp_path / str(blocks))) <= blocks
    with pytest.raises(ModelError, match="kv_disk_gib holds no block"):
        make_engine(checkpoints["llama"], kv_disk_path=tmp_path / "none", kv_disk_gib=block_bytes / 2**31)
    engine, _ = make_engine(checkpoints["llama"], kv_disk_path=tmp_path / "7", kv_disk_gib=2.5 * block_bytes / 2**30)
    assert len(engine.scheduler.technique("tiers").tiers.slow[0].index) == 2, "a smaller tier gives up the oldest"
    engine.close()


def test_a_full_disk_loses_nothing(checkpoints, expected, tmp_path, monkeypatch, caplog):
    real = os.writev
    written = [0]

    def writev(fd, buffers):
        written[0] += 1
        if written[0] > 6:
            raise OSError(28, "No space left on device")
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)
    tokens, published, engine = serve(checkpoints["llama"], kv_disk_path=tmp_path, kv_host_gib=1e-3)
    engine.close()
    assert tokens == expected and len(block_files(tmp_path)) == 6 and not list(tmp_path.glob("*/*.part"))
    assert "No space left on device" in caplog.text and "lower kv_disk_gib" in caplog.text
    assert len(caplog.records) < 5, "one sentence a minute"
    assert sum(record.tier_failures.get("disk", 0) for record in published.records) > 0


def test_two_servers_do_not_share_a_folder(checkpoints, tmp_path):
    engine, _ = make_engine(checkpoints["llama"], kv_disk_path=tmp_path)
    with pytest.raises(ModelError, match="in use by another server"):
        make_engine(checkpoints["llama"], kv_disk_path=tmp_path)
    engine.close()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        make_engine(checkpoints["llama"], kv_disk_path=file)


def test_settings_that_contradict_each_other_are_refused():
    for settings, why in (
        ({"kv_disk_gib": 1}, "kv_disk_path is not set"),
        ({"kv_store_policy": "fill"}, "there is no KV tier"),
        ({"kv_host_gib": 1, "prefix_caching": False}, "by their prefix"),
        ({"eviction_policy": "ttl"}, "go together"),
        ({"eviction_ttl_seconds": 3}, "go together"),
    ):
        with pytest.raises(ValueError, match=why):
            EngineConfig(model="tiny-model", **settings)
    with pytest.raises(ModelError, match="kv_host_gib holds no block"):
        build(EngineConfig(model="tiny-model", kv_host_gib=1e-9, threads=1), 0, print)


WRITER = """
import sys
from pathlib import Path
from sojourn.engine.techniques.tiers.block_format import BlockFormat
from sojourn.engine.techniques.tiers.disk import Disk
from sojourn.engine.techniques.tiers.medium_store import MediumStore
memory = memoryview(bytearray(range(256)) * 4096)
store = MediumStore(Disk(Path(sys.argv[1]), BlockFormat(b"f" * 16, len(memory)), lambda slot: memory))
print("ready", flush=True)
for number in range(100000):
    store.write(number.to_bytes(16, "big"), 0)
    store.wait()
"""


def test_a_process_that_is_killed_while_it_writes_leaves_no_half_block(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while len(block_files(tmp_path)) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    memory = memoryview(bytearray(256 * 4096))
    store = MediumStore(Disk(tmp_path, BlockFormat(b"f" * 16, len(memory)), lambda slot: memory))
    known = store.known()
    assert len(known) >= 5 and not list(tmp_path.glob("*/*.part"))
    for key in known:
        store.read(key, 0)
    ended = []
    while len(ended) < len(known) and time.monotonic() < deadline + 20:
        store.wait()
        ended += store.finished()
    assert all(moved.ok for moved in ended) and len(ended) == len(known)
    assert bytes(memory) == bytes(range(256)) * 4096
    store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("stores", ["fill", "evict"])
def test_copies_beside_a_gpu_change_no_token(checkpoints, stores):
    settings = {"device": "cuda", "num_kv_blocks": 24}
    plain = serve(checkpoints["llama"], **settings)[0]
    tokens, published, engine = serve(checkpoints["llama"], kv_host_gib=1e-3, kv_store_policy=stores, **settings)
    assert tokens == plain and loaded(published)["host"] > 0
    cache, slots = engine.runner.eager.kv_cache, engine.runner.part("tiers").slots
    before = cache.values[:, :, :3].clone()
    slots.store([(0, 5), (1, 6), (2, 7)])
    slots.finish_stores()
    cache.values[:, :, :3] = 0
    slots.load([(5, 0), (6, 1), (7, 2)])
    assert (cache.values[:, :, :3] == before).all()
