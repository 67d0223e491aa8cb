"""Several LoRA adapters in one batch give the tokens of models with the adapters merged into their weights."""

import shutil
from pathlib import Path

import msgspec
import pytest
from torch.utils.flop_counter import FlopCounterMode

from sojourn.engine.messages import Submit
from sojourn.metrics.ledger import Account
from tests.engine.adapters import LINEARS, merged, reference, write_adapter
from tests.engine.harness import drain, generate, hand_over, make_engine, submit

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21] * 2, [3, 4, 5], [30, 31, 32, 33]]
ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
TARGETS = {"mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"], "deepseek-v3": ATTENTION, "mixtral": LINEARS[:4]}


@pytest.fixture(scope="module")
def family(checkpoints, tmp_path_factory):
    """Family → folder with three adapters `a0` to `a2` of its model, and models `m0` to `m2` that have them merged."""

    def made(name: str) -> tuple[Path, Path]:
        base, root = checkpoints[name], roots / name
        targets = TARGETS.get(name, LINEARS)
        configs = (
            {"r": 4, "rank_pattern": {targets[1]: 5}, "alpha_pattern": {targets[2]: 3}, "target_modules": targets},
            {"r": 7, "use_rslora": True, "target_modules": rf".*\.({'|'.join(targets)})"},
            {"r": 16, "target_modules": targets[1:3], "layers_to_transform": [1]},
        )
        if not root.exists():
            for index, config in enumerate(configs):
                write_adapter(base, root / f"a{index}", index, **config)
                merged(base, root / f"a{index}", root / f"m{index}")
        return base, root

    roots = tmp_path_factory.mktemp("adapters")
    return made


def asked(name: str, prompt: list[int], folder: Path | None, **sampling) -> Submit:
    request = submit(name, prompt, **sampling)
    return request if folder is None else msgspec.structs.replace(request, adapter=reference(folder))


def mixed(base: Path, root: Path, **settings) -> dict[str, list[int]]:
    """Tokens of each prompt with each adapter and without one, all in one engine."""
    adapters = {f"a{index}": root / f"a{index}" for index in range(3)}
    engine, published = make_engine(base, lora_adapters=adapters, **settings)
    requests = [
        asked(f"{name}-{place}", prompt, folder)
        for place, prompt in enumerate(PROMPTS)
        for name, folder in (*adapters.items(), ("base", None))
    ]
    hand_over(engine, requests)
    drain(engine, check=True)
    assert engine.scheduler.technique("lora").slots.in_use == 0
    return dict(published.tokens)


def alone(base: Path, root: Path) -> dict[str, list[int]]:
    folders = {"base": base} | {f"a{index}": root / f"m{index}" for index in range(3)}
    found = {name: generate(folder, PROMPTS)[0] for name, folder in folders.items()}
    return {f"{name}-{place}": tokens for name, outputs in found.items() for place, tokens in enumerate(outputs)}


@pytest.mark.parametrize("name", ["qwen3", "mpt", "deepseek-v3", "mixtral"])
def test_a_batch_of_adapters_gives_the_tokens_of_merged_models(family, name):
    base, root = family(name)
    oracle = alone(base, root)
    assert len(set(map(tuple, oracle.values()))) == len(oracle), "every adapter changes the tokens"
    assert mixed(base, root) == oracle


@pytest.mark.parametrize(
    "settings",
    [
        {"fused_operations": "off", "attention_backend": "torch"},
        {"max_loras": 1},
        {"overlap": "on", "max_loras": 2},
        {"max_prefill_chunk_tokens": 5, "prefix_caching": False},
        {"num_kv_blocks": 8, "max_model_len": 64},
        {"lora_host_gib": 2e-4, "max_loras": 2},
    ],
    ids=["reference", "one slot", "overlap", "chunks", "preemptions", "little host memory"],
)
def test_settings_change_no_token(family, settings):
    base, root = family("qwen3")
    assert mixed(base, root, **settings) == alone(base, root)


def test_the_flops_of_adapters_are_what_torch_counts(family):
    base, root = family("qwen3")
    counted, recorded = [], []
    for folder in (None, root / "a1"):
        engine, published = make_engine(
            base, lora_adapters={"a1": root / "a1"}, fused_operations="off", attention_backend="torch"
        )
        with FlopCounterMode(display=False) as counter:
            hand_over(engine, [asked("r", PROMPTS[0], folder)])
            drain(engine)
        counted.append(counter.get_total_flops())
        recorded.append(sum(record.flops_adapters for record in published.records))
        (names,) = {record.adapter_slots for record in published.records}
        assert names == (folder is not None)
    assert recorded == [0, counted[1] - counted[0]]


def test_a_changed_file_and_a_missing_one_end_their_requests_with_a_sentence(family, tmp_path):
    base, root = family("qwen3")
    folder = Path(shutil.copytree(root / "a0", tmp_path / "a0"))
    engine, published = make_engine(base, lora_adapters={"a0": folder})
    known = asked("changed", PROMPTS[1], folder)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text() + " ")
    hand_over(engine, [known, asked("base", PROMPTS[1], None)])
    drain(engine)
    (folder / "adapter_model.safetensors").unlink()
    hand_over(engine, [msgspec.structs.replace(known, request_id="missing")])
    drain(engine)
    ended = published.ended
    assert ended["changed"].reason == ended["missing"].reason == "error" and ended["base"].reason == "length"
    assert "changed since it was loaded" in ended["changed"].error
    assert "has no adapter_model.safetensors" in ended["missing"].error
    hand_over(engine, [asked("a0", PROMPTS[1], root / "a0")])
    drain(engine)
    assert published.ended["a0"].reason == "length", "a failed read leaves nothing behind"


def test_a_request_pays_for_the_reading_of_its_adapter_in_an_account_of_its_own(family):
    base, root = family("qwen3")
    waited = []
    for _ in range(5):  # a read may be over before the first step looks
        engine, published = make_engine(base, lora_adapters={"a0": root / "a0"})
        for name in ("first", "second"):
            hand_over(engine, [asked(name, PROMPTS[1], root / "a0")])
            drain(engine)
        first, second = published.ended["first"], published.ended["second"]
        assert second.ledger[Account.MEMORY_ADAPTER_LOAD] == 0
        assert (first.adapter_loads, second.adapter_loads) == (1, 0)
        assert second.cached_tokens == first.cached_tokens
        waited.append(first.ledger[Account.MEMORY_ADAPTER_LOAD])
    assert max(waited) > 0
