"""A group of processes gives the tokens of one process, and its end is the end of all ranks."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from engine import LLM, SamplingParams
from engine.config import model_folder
from metrics.compute.communication import group_shape
from metrics.records import ACTIVITIES
from tests.further import further

pytestmark = pytest.mark.server
# Two prompts begin alike, and the pool has room for about two of the requests: some are preempted.
PROMPTS = [list(range(40, 90)), list(range(40, 80)) + [7] * 9, [5] * 30, list(range(200, 245))]
SIZES = {"num_kv_blocks": 14, "max_model_len": 160, "block_size": 16, "threads": 1}
ADAPTERS = {
    "max_loras": 2,  # fewer than the adapters
    "lora_adapters": [f"{name}=tiny-adapters/{name}" for name in ("files", "network", "tests")],
}


def outputs(**settings) -> list[list[int]]:
    greedy, drawn = (
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
    )
    penalised = SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=1.0)
    steps = []
    with LLM("tiny-model", on_steps=steps.extend, **SIZES, **ADAPTERS, **settings) as llm:
        found = llm.generate(PROMPTS, [greedy, drawn, penalised, greedy], n=2)
        found += llm.generate(PROMPTS[:1], greedy)
        adapted = llm.generate(PROMPTS[:1] * 4, greedy, lora=[None, "files", "network", "tests"])
        assert len({tuple(completion.token_ids) for completion in adapted}) > 2, "adapters change the tokens"
        found += adapted
        group = group_shape(llm.ready.shape, settings, llm.ready.dtype)
    assert any(step.preempted_ids for step in steps), "the pool is small enough"
    if settings:
        assert any(step.drafted_tokens for step in steps) == ("speculation" in settings)
        if "pipeline_parallel" not in settings:  # whose steps overlap: a record has the time behind the step before
            assert all(step.communication_ns <= step.device_ns for step in steps)
        assert max(len(step.rank_busy_ns) for step in steps) == 2
        if "pipeline_parallel" not in settings:
            for step in steps:  # the device's time of rank 0 is what the rank computed and exchanged, to the nanosecond
                assert step.rank_busy_ns[0] + step.rank_communication_ns[0] + step.rank_bubble_ns[0] == step.device_ns
        wall = steps[-1].end_ns - steps[0].begin_ns
        for rank in range(2):
            spent = sum(
                sum(getattr(step, f"rank_{activity}_ns")[rank:][:1]) for step in steps for activity in ACTIVITIES
            )
            assert 0 < spent <= wall + 50_000_000  # the last report of a step may stand in the next record
        if "pipeline_parallel" in settings:  # the last stage computes, sends, or waits for another one
            warm = steps[5:]  # before them memory is faulted in
            turns = sum(step.end_ns - step.begin_ns for step in warm)
            spent = sum(sum(getattr(step, f"rank_{name}_ns")[1:]) for step in warm for name in ACTIVITIES)
            assert 0.9 * turns < spent <= 1.02 * turns
            assert sum(step.exchange_hidden_ns.get("recv", 0) for step in steps) > 0
        for step in steps:
            expected = group.exchanges(sum(step.new_tokens), step.logit_rows)
            found_bytes = {name: step.exchanged_bytes.get(name, 0) for name in expected}
            assert found_bytes == {name: each.bytes for name, each in expected.items()}
    return [completion.token_ids for completion in found]


def test_groups_give_the_tokens_of_one_process_and_leave_no_process():
    alone = outputs()
    for settings in (
        {"tensor_parallel": 2, "speculation": "ngram"},
        {"tensor_parallel": 2, "overlap": "on"},
        {"pipeline_parallel": 2, "speculation": "draft-model", "speculation_model": "tiny-draft"},
    ):
        assert outputs(**settings) == alone, settings
        assert not ranks()


@pytest.fixture(scope="module")
def mixture(checkpoints, tmp_path_factory):
    """A mixture-of-experts model with the bundled model's tokenizer."""
    folder = shutil.copytree(checkpoints["mixtral"], tmp_path_factory.mktemp("mixture") / "mixtral")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder("tiny-model") / name, folder / name)
    return folder


def scored(folder: Path, **settings) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities."""
    with LLM(folder, **SIZES, **settings) as llm:
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0))
    return [(each.token_ids, [token.logprob for token in each.logprobs]) for each in found]


@pytest.mark.parametrize(
    "settings",
    [
        {"expert_parallel": 2, "expert_exchange": "all-to-all"},
        *further({"expert_parallel": 2},
                 {"tensor_parallel": 2, "expert_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2},
                 {"pipeline_parallel": 2, "expert_parallel": 2}),
    ],
    ids=lambda settings: " ".join(settings),
)  # fmt: skip
def test_ranks_hold_experts_and_stages(mixture, settings):
    alone, divided = scored(mixture), scored(mixture, **settings)
    for expected, found in zip(alone, divided, strict=True):
        assert found[0] == expected[0]
        assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert not ranks()


def test_rank_that_is_killed_ends_the_calls_with_an_error():
    with LLM("tiny-model", tensor_parallel=2, **SIZES) as llm:
        (rank,) = ranks()
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(Exception, match="rank 1 of the parallel group was killed by signal 9"):
            llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
    assert not ranks()


def ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engine.group.rank" in " ".join(child.cmdline())]
