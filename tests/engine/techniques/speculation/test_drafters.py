"""Drafters with weights: they draft what their definition says, wherever the scheduler cuts; a folder that does not fit
is refused; what they cost is what torch counts. The exactness of outputs is in test_speculation.py."""

import json
import random
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.utils.flop_counter import FlopCounterMode

from sojourn.engine.compute.kv_cache import KVLayout, allocate
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.runner.build import allocated, trial_plans
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.techniques.computing import computing, planned_memory
from sojourn.engine.techniques.speculation.proposers.draft_model import ComputedBlocks, DraftModelProposer
from sojourn.engine.techniques.speculation.proposers.drafters import outlined_drafter
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep, Proposal, SequenceStep
from sojourn.engine.token.models.registry import load_model
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.techniques.speculation import drafter_folders as folders
from tests.engine.token.models.test_flops import DefinedAttention
from tests.further import further

CPU = torch.device("cpu")
DRAFTERS = folders.DRAFTERS
TIGHT = {"num_kv_blocks": 14, "max_model_len": 192, "max_num_batched_tokens": 24, "max_num_seqs": 3}


def prompts() -> list[list[int]]:
    dice = random.Random(5)
    longest = [dice.randrange(3, 320) for _ in range(61)]
    return [[7, 9, 4], [*longest[:32], 5, 6], longest, longest[:48], longest]


def drafted(settings: dict, max_tokens: int = 14) -> tuple[dict, dict[str, list[tuple[list[int], list[int]]]], list]:
    """Tokens by request, its (known tokens, drafts) of each proposal, and the records of steps. The last request is a
    fork of the one before it."""
    settings = {"speculation_adaptive": "off", "speculation_tokens": 4} | settings
    engine, published = make_engine(settings.pop("model"), **settings)
    proposals, proposer = {}, engine.runner.part("speculation").proposer
    propose = proposer.propose

    def watched(step: ComputedStep) -> Proposal:
        proposal = propose(step)
        known = {s.request.id: s.request.token_ids + s.sampled for s in step.sequences if s.wanted}
        for request_id, drafts in proposal.drafts.items():
            proposals.setdefault(request_id, []).append((known[request_id], drafts))
        return proposal

    proposer.propose = watched
    for index, prompt in enumerate(prompts()):  # one after another, so that the later ones find prefixes
        hand_over(engine, [submit(f"r{index}", prompt, max_tokens)])
        engine.receive([], engine.step())
    drain(engine)
    leader = submit("leader", prompts()[1], max_tokens)
    hand_over(engine, [leader, replace(leader, request_id="fork", fork_of="leader")])
    drain(engine, check=True)
    return published.tokens, proposals, published.records


@torch.no_grad()
def defined(name: str, checkpoints):
    """What a drafter should draft: (known tokens, count) → drafts, by plain torch and transformers."""
    from transformers import AutoModelForCausalLM

    if name == "mtp":
        whole = folders.three_layers()
        return partial(folders.mtp_drafts, whole, folders.two_layers(whole))
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    if name == "draft model":
        model = load(checkpoints["qwen3"])

        def continued(known: list[int], count: int) -> list[int]:
            options = dict(do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0)
            return model.generate(torch.tensor([known]), **options)[0, len(known) :].tolist()

        return continued
    target = load(checkpoints["llama"])
    return {
        "medusa": partial(folders.medusa_drafts, target),
        "medusa of vllm": partial(folders.medusa_drafts, target, rows=folders.token_map()),
        "eagle3": partial(folders.eagle3_drafts, target, norm_before_residual=True),
        "eagle3 of its authors": partial(folders.eagle3_drafts, target, norm_before_residual=False),
    }[name]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, TIGHT) for name in DRAFTERS), *further(*((name, {"prefix_caching": False}) for name in DRAFTERS))],
)
def test_drafts_are_those_of_a_computation_without_a_cache(name, settings, drafter, checkpoints):
    """With chunks, preemptions and prefixes that were found, too. Only a layer that reads hidden states has one entry
    of a found prefix that read another next token, so there its drafts are compared without prefixes."""
    if settings is TIGHT and name not in ("draft model", "medusa"):
        settings = TIGHT | {"prefix_caching": False}
    _, proposals, _ = drafted(drafter(name) | settings)
    oracle = defined(name, checkpoints)
    fork = proposals.pop("fork")
    others = [proposal for found in proposals.values() for proposal in found]
    assert len(others) > 30
    with torch.no_grad():
        for known, drafts in fork[:3] + random.Random(1).sample(others, 14):
            assert drafts == oracle(known, len(drafts)), f"after {len(known)} tokens"


@pytest.mark.parametrize("settings", [TIGHT, {"block_size": 5}, *further({})])
def test_a_draft_model_that_is_its_target_is_always_right(settings, checkpoints):
    settings = {"model": str(checkpoints["llama"]), "speculation_model": str(checkpoints["llama"])} | settings
    _, _, records = drafted(settings | {"speculation": "draft-model"})
    verified = sum(step.drafted_tokens for step in records)
    assert verified > 40 and verified == sum(step.accepted_tokens for step in records)


def test_forks_draft_from_copies_of_the_blocks_that_they_share(checkpoints):
    """The draft model's cache has the same copies: else the siblings would draft from empty blocks."""
    settings = {"speculation": "draft-model", "speculation_model": str(checkpoints["llama"])}
    engine, published = make_engine(checkpoints["llama"], speculation_adaptive="off", **settings)
    hand_over(engine, [submit(f"old{i}", prompts()[2], 30) for i in range(3)])  # leaves its traces in the blocks
    drain(engine)
    proposer, passes = engine.runner.part("speculation").proposer, []
    propose = proposer._computed
    proposer._computed = lambda ids, *at: (
        passes.append(len(ids)),
        propose(ids, *at),
    )[1]
    siblings = [replace(submit(f"fork{i}", prompts()[0] * 9, 12), fork_of="leader") for i in range(3)]
    hand_over(engine, [submit("leader", prompts()[0] * 9, 12), *siblings])
    drain(engine, check=True)
    assert sum(step.drafted_tokens for step in published.records) > 60
    assert all(step.drafted_tokens == step.accepted_tokens for step in published.records)
    assert published.tokens["fork0"] == published.tokens["leader"]
    assert sorted(passes)[-1] < 27 + 9, "the siblings compute the last token of the prompt, and no more"


def test_a_draft_model_computes_what_a_tier_gave_the_model_alone(checkpoints):
    """The slots of a block that was loaded hold the draft model's keys and values of other tokens."""
    settings = {"speculation": "draft-model", "speculation_model": str(checkpoints["llama"]), "num_kv_blocks": 12}
    settings |= {"kv_host_gib": 0.01, "kv_store_policy": "fill", "max_num_batched_tokens": 32, "max_model_len": 180}
    engine, published = make_engine(checkpoints["llama"], speculation_adaptive="off", **settings)
    dice = random.Random(8)
    texts = [[dice.randrange(3, 320) for _ in range(160)] for _ in range(3)]
    for turn, prompt in enumerate(texts * 2):
        hand_over(engine, [submit(f"r{turn}", prompt, 12)])
        drain(engine)
    loaded = sum(step.tier_loaded_bytes.get("host", 0) for step in published.records)
    verified = sum(step.drafted_tokens for step in published.records)
    assert loaded > 0 and verified == sum(step.accepted_tokens for step in published.records)


def test_a_prefix_that_was_drafted_behind_is_not_computed_again(checkpoints):
    settings = {"speculation": "draft-model", "speculation_model": str(checkpoints["llama"])}
    engine, _ = make_engine(checkpoints["llama"], speculation_adaptive="off", **settings)
    passes, proposer = [], engine.runner.part("speculation").proposer
    computed = proposer._computed
    proposer._computed = lambda ids, *at: (passes.append(len(ids)), computed(ids, *at))[1]
    for index, most in enumerate((62, 14)):
        passes.clear()
        hand_over(engine, [submit(f"r{index}", prompts()[2], 8)])
        drain(engine)
        assert max(passes) == most, "the whole prompt and a token; then what is behind its three full blocks"


def test_blocks_say_how_far_they_were_computed():
    """Positions that the target writes are of new tokens, whatever the block's last owner had there."""
    blocks = ComputedBlocks(num_blocks=4, block_size=4)
    blocks.computed([2, 0, 3], 0, 10)
    assert [blocks.leading([2, 0, 3], length) for length in (12, 10, 9, 8, 3)] == [10, 10, 9, 8, 3]
    assert blocks.leading([2, 1, 3], 12) == 4
    blocks.copied([(0, 1), (3, 0)])
    assert blocks.leading([2, 1, 0], 12) == 10
    blocks.overwritten([3, 1], 2, 6)
    assert [blocks.leading([block], 4) for block in (0, 1, 2, 3)] == [2, 0, 4, 2]
    blocks.overwritten([2], 4, 4)
    assert blocks.leading([2], 4) == 4
    blocks.lost([2, 0])
    assert [blocks.leading([block], 4) for block in (0, 1, 2, 3)] == [0, 0, 0, 2]


def test_a_copied_block_counts_as_computed_though_its_source_was_loaded_into_in_the_same_step():
    cache = allocate(KVLayout(2, 1, 4), 1, 4, 4, torch.float32, CPU)
    model = SimpleNamespace(shape=lambda dtype: None)
    proposer = DraftModelProposer(model, cache, 4, attention=None, operations=None, max_tokens=8)
    proposer._blocks.computed([1], 0, 4)
    proposer.propose(ComputedStep([], copies=[(1, 2)], loaded=[1]))
    assert [proposer._blocks.leading([block], 4) for block in (1, 2)] == [0, 4]


@pytest.mark.parametrize("name", ["draft model", "eagle3", "mtp"])
def test_a_drafter_catches_up_after_steps_that_nobody_wanted_drafts_of(name, drafter, checkpoints):
    settings = drafter(name)
    engine, _ = make_engine(settings.pop("model"), **settings, speculation_adaptive="off")
    lengths, quiet, proposals, passes = engine.scheduler.technique("speculation").lengths, [], [], []
    wanted, proposer = lengths.wanted, engine.runner.part("speculation").proposer
    lengths.wanted = lambda sampling, plan: {} if quiet else wanted(sampling, plan)
    propose, computed = proposer.propose, proposer._computed

    def watched(step: ComputedStep) -> Proposal:
        proposal = propose(step)
        proposals.extend((step.sequences[0].request.token_ids + step.sequences[0].sampled, drafts)
                         for drafts in proposal.drafts.values())  # fmt: skip
        return proposal

    proposer.propose = watched
    proposer._computed = lambda ids, *at: (passes.append((len(quiet), len(ids))), computed(ids, *at))[1]
    hand_over(engine, [submit("r", prompts()[1], 60)])
    for turn in range(20):
        quiet[:] = [turn] if 4 <= turn < 12 else []
        engine.receive([], engine.step())
    drain(engine)
    assert sum(1 for is_quiet, _ in passes if is_quiet) <= 4, "only for the drafts that the first such step verified"
    assert max(size for _, size in passes[2:]) >= 8
    oracle = defined(name, checkpoints)
    with torch.no_grad():
        for known, drafts in proposals[4:14]:
            assert drafts == oracle(known, len(drafts))


def test_greedy_tokens_are_those_of_assisted_generation(checkpoints, drafter):
    """transformers' own speculation, with the same two models."""
    from transformers import AutoModelForCausalLM

    target, assistant = (AutoModelForCausalLM.from_pretrained(checkpoints[name]) for name in ("llama", "qwen3"))
    tokens, _, _ = drafted(drafter("draft model"))
    for index, prompt in enumerate(prompts()[:2]):
        options = dict(do_sample=False, max_new_tokens=14, eos_token_id=None, pad_token_id=0)
        output = target.generate(torch.tensor([prompt]), assistant_model=assistant, **options)
        assert tokens[f"r{index}"] == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["draft model", "medusa", "eagle3", "mtp"])
def test_flops_are_exactly_those_that_torch_counts(name, drafter):
    settings = drafter(name)
    config = SimpleNamespace(
        **settings, weights=None, attention_backend="torch", fused_operations="off", max_num_seqs=4
    )
    model = load_model(Path(settings["model"]), torch.float32, CPU, None)
    target = PlacedModel(model, Path(settings["model"]), CPU, torch.float32, torch.float32, 256, 128)
    found = outlined_drafter(config, target)
    proposer = found.load(target, 32, 16)
    proposer._attention = DefinedAttention()
    sequences, row = [], 0
    for index, (past, new, wanted) in enumerate([(20, 1, 3), (0, 37, 4), (33, 4, 1), (0, 18, 0)]):
        known, blocks = list(range(3, 3 + past + new)), list(range(8 * index, 8 * index + 8))
        request = SimpleNamespace(id=str(index), token_ids=known, prompt_tokens=len(known), blocks=blocks)
        sequences.append(SequenceStep(request, past, new, row, [9] if wanted else [], wanted))
        row += new
    hidden = [torch.randn(row, 64) for _ in range(4)]
    with FlopCounterMode(display=False) as counter:
        proposal = proposer.propose(ComputedStep(sequences, hidden[0], hidden[1:]))
    assert proposal.flops == counter.get_total_flops() > 0
    held = [module for module in vars(proposer).values() if isinstance(module, torch.nn.Module)]
    weights = sum(part.nbytes for module in held for part in module.parameters())
    assert weights / 2 < proposal.moved_bytes < 8 * (weights + model.weight_bytes), (
        "four passes, with the target's head"
    )


@pytest.mark.parametrize("name", ["draft model", "eagle3", *further("medusa", "medusa of vllm", "mtp")])
def test_the_memory_plan_knows_what_a_drafter_takes(name, drafter):
    settings = drafter(name)
    config = EngineConfig(**settings, threads=1, num_kv_blocks=32, max_model_len=256, weights="float32")
    folder = Path(settings["model"])
    extra = planned_memory(config, folder)
    plain = planned_memory(config.model_copy(update={"speculation": "none"}), folder)
    model = load_model(folder, torch.float32, CPU, 256, weights="float32")
    target = PlacedModel(model, folder, CPU, torch.float32, torch.float32, 256, 512)
    proposer = outlined_drafter(config, target).load(target, 32, config.block_size)
    cache = getattr(proposer, "_kv_cache", None)
    assert extra.kv_bytes - plain.kv_bytes == (0 if cache is None else cache.nbytes)
    held = [module for module in vars(proposer).values() if isinstance(module, torch.nn.Module)]
    matrices = sum(p.nbytes for module in held for p in [*module.parameters(), *module.buffers()])
    packed = sum(getattr(part, "packed_bytes", 0) for module in held for part in module.modules())
    promised = extra.weight_bytes - plain.weight_bytes
    assert promised == pytest.approx(matrices + packed, rel=0.35)  # kernels pad small matrices to 64 rows
    assert extra.work_bytes > plain.work_bytes


def test_a_drafter_takes_no_part_while_the_memory_is_measured(drafter):
    """Its own memory is not there yet. On a GPU the largest steps are computed before the KV pool is shared out."""
    settings = drafter("draft model")
    config = EngineConfig(**settings, threads=1, num_kv_blocks=32, max_model_len=64, max_num_seqs=4)
    runner = ModelRunner(config, Path(settings["model"]), StartupClock(), computing(config))
    runner.eager.kv_cache = allocated(runner.placed, 8, config.block_size)
    with torch.inference_mode():
        for plan in trial_plans(config, runner.placed):
            outcome = runner.collect(runner.launch(plan))
            assert outcome.sampled and not outcome.drafts and outcome.draft_ns == 0
            for item in plan.scheduled:
                runner.forget(item.request.id)


def changed(folder: Path, copy: Path, config: dict, tensors=lambda tensors: tensors) -> Path:
    shutil.copytree(folder, copy)
    content = json.loads((copy / "config.json").read_text()) | config
    (copy / "config.json").write_text(json.dumps(content))
    save_file(tensors(load_file(copy / "model.safetensors")), copy / "model.safetensors")
    return copy


def without(name: str):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("name", "config", "tensors", "sentence"),
    [
        ("medusa", {"hidden_size": 32}, dict, "hidden_size=32"),
        ("medusa", {"vocab_size": 400}, dict, "vocab_size=400"),
        ("medusa", {}, without("1.0.linear.weight"), "lacks 1 tensors, among them blocks.1.layers.0.weight"),
        ("medusa", {"medusa_num_heads": 2}, dict, "has no place"),
        ("medusa", {"medusa_num_layers": None}, dict, "lacks num_hidden_layers"),
        ("eagle3", {"draft_vocab_size": 100}, dict, "expected [100]"),
        ("eagle3", {}, without("d2t"), "lacks d2t"),
        ("eagle3", {}, without("fc.weight"), "among them fc.weight"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, dict, "from 0 to 3"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, dict, "from 0 to 3"),
        ("eagle3", {"target_hidden_size": 128}, dict, "target_hidden_size=128"),
        ("eagle3 of its authors", {"num_hidden_layers": 2}, dict, "num_hidden_layers=2"),
        ("eagle3 of its authors", {"hidden_size": 48}, dict, "hidden_size=48"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(name, config, tensors, sentence, drafter, tmp_path):
    settings = drafter(name)
    copy = changed(Path(settings["speculation_model"]), tmp_path / "changed", config, tensors)
    with pytest.raises(ModelError) as refusal:
        planned_memory(EngineConfig(**settings | {"speculation_model": str(copy)}), Path(settings["model"]))
    assert sentence in str(refusal.value)


def test_a_target_without_the_drafter_is_refused(checkpoints, drafter, tmp_path):
    llama = str(checkpoints["llama"])
    lacking = changed(Path(drafter("mtp")["model"]), tmp_path / "lacking", {"num_nextn_predict_layers": 0})
    for settings, sentence in (
        ({"model": llama, "speculation": "mtp"}, "this model is LlamaForCausalLM"),
        ({"model": str(checkpoints["deepseek-v3"]), "speculation": "mtp"}, "needs the extra layer model.layers.2"),
        ({"model": str(lacking), "speculation": "mtp"}, "num_nextn_predict_layers=0"),
        ({"model": llama, "speculation": "medusa", "speculation_model": "/nowhere"}, "/nowhere does not exist"),
        ({"model": llama, "speculation": "draft-model", "speculation_model": "/nowhere"}, "/nowhere does not exist"),
        ({"model": llama, "speculation": "eagle3", "speculation_model": str(tmp_path)}, "has no config.json"),
        ({"model": llama, "speculation": "draft-model", "speculation_model": "tiny-model"}, "another vocabulary"),
    ):
        with pytest.raises(ModelError) as refusal:
            planned_memory(EngineConfig(**settings), Path(settings["model"]))
        assert sentence in str(refusal.value)


def test_a_draft_model_may_differ_in_padding_alone(checkpoints, tmp_path):
    """Vocabularies of one family are padded to other sizes; the tokenizers say that their tokens are the same."""
    folder = shutil.copytree(checkpoints["llama"], tmp_path / "target")
    for copy in (folder, draft := shutil.copytree(checkpoints["qwen3"], tmp_path / "draft")):
        (copy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}))
    settings = EngineConfig(model=str(folder), speculation="draft-model", speculation_model=str(draft))
    planned_memory(settings, folder)
    (draft / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}, "added_tokens": []}))
    with pytest.raises(ModelError, match="another vocabulary"):
        planned_memory(settings, folder)


@pytest.mark.parametrize(
    ("speculation", "folder", "least"),
    [("draft-model", "tiny-draft", 0.6), ("medusa", "tiny-medusa", 0.25), ("eagle3", "tiny-eagle3", 0.5)],
)
def test_the_bundled_drafters_know_the_bundled_model(speculation, folder, least):
    """Of the first drafts of greedy continuations; docs/results/speculation.md has the figures of held-out text."""
    tokenizer = Tokenizer.from_file(str(model_folder("tiny-model") / "tokenizer.json"))
    lines = (model_folder("tiny-model") / "prompts.txt").read_text(encoding="utf-8").splitlines()
    settings = {"speculation": speculation, "speculation_model": folder, "speculation_adaptive": "off"}
    engine, published = make_engine("tiny-model", **settings)
    hand_over(engine, [submit(f"r{i}", tokenizer.encode(lines[40 * i]).ids[:30], 40) for i in range(8)])
    drain(engine)
    tried, accepted = (sum(getattr(step, name)[0] for step in published.records if getattr(step, name))
                       for name in ("drafted_by_position", "accepted_by_position"))  # fmt: skip
    assert accepted / tried > least
