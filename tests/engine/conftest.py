"""Tiny random checkpoints, as Hugging Face transformers writes them, and transformers itself as the oracle."""

import pytest

import tests.engine.compute.triton_harness  # noqa: F401  (before anything imports triton, as torch's flop counter does)
from tests.engine.families import Checkpoints, random_model
from tests.engine.rank_pool import RankPool
from tests.engine.server_process import serving
from tests.engine.toolmodel import make_tool_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Family → folder: float32, in shards."""
    return Checkpoints(
        tmp_path_factory.mktemp("checkpoints"),
        lambda name, folder: random_model(name).save_pretrained(folder, max_shard_size="100KB"),
    )


@pytest.fixture(scope="session")
def ranks():
    """Processes for tests of several ranks. None is left behind, and each ends well."""
    pool = RankPool()
    yield pool
    assert set(pool.close()) <= {0}


@pytest.fixture(scope="session")
def oracle(checkpoints):
    """(family, prompt ids, number of tokens) → transformers' greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    models = {}

    def greedy(family: str, prompt: list[int], max_tokens: int) -> list[int]:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
        ids = torch.tensor([prompt])
        output = models[family].generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist()

    return greedy


@pytest.fixture(scope="session")
def api_server(tmp_path_factory):
    """The bundled model, served once for all tests that only ask it; what it records lies in `run_dir`."""
    folder = tmp_path_factory.mktemp("api")
    with serving(folder, "tiny-model", "--max-model-len", "512", "--run-dir", str(folder / "run")) as server:
        yield server


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory):
    """The bundled model under its own name, with a chat template that knows tools."""
    folder = tmp_path_factory.mktemp("tools")
    name = ("--served-model-name", "tiny-model", "--max-model-len", "1024")
    with serving(folder, str(make_tool_model(folder / "model")), *name) as server:
        yield server
