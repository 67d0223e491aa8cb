"""A request whose numbers overflow ends with a sentence, and leaves all others alone."""

import msgspec
import pytest
import torch

from sojourn.engine.runner.batch import OVERFLOW
from tests.engine.families import random_model
from tests.engine.harness import drain, hand_over, make_engine, submit

BROKEN = 7  # the token that overflows


@pytest.fixture(scope="module", params=["llama", "deepseek-v3", "mixtral"])
def folder(request, tmp_path_factory):
    """A checkpoint of which one token is embedded at infinity, and the head is another tensor."""
    model = random_model(request.param)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = torch.inf
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def test_blocks_of_a_request_that_overflowed_give_the_next_owner_the_same_tokens(folder):
    prompts = [[20 + i, 21, 22] * (1 + 4 * (i % 3)) for i in range(6)]

    def tokens(engine, published, turn: str) -> list[list[int]]:
        hand_over(engine, [submit(f"{turn}{i}", prompt, allowed_token_ids=[*range(8, 300)])
                           for i, prompt in enumerate(prompts)])  # fmt: skip
        drain(engine, check=True)
        return [published.tokens[f"{turn}{i}"] for i in range(len(prompts))]

    engine, published = make_engine(folder, num_kv_blocks=20, max_model_len=256)
    hand_over(engine, [submit("broken", [BROKEN] * 250, 4)])
    drain(engine)
    hand_over(engine, [submit("beside", [9, BROKEN], 12)])
    assert tokens(engine, published, "after") == tokens(*make_engine(folder, prefix_caching=False), "alone")


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1.2, "logprobs": 2},
        {"allowed_token_ids": [3, 4, 5]},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompt", [[5, 6, BROKEN], [5, BROKEN, 6], [BROKEN] + [5] * 40], ids=["last", "inner", "far"])
def test_request_that_overflows_ends_with_a_sentence(prompt, sampling, folder):
    engine, published = make_engine(folder, max_num_batched_tokens=16)
    hand_over(engine, [submit("broken", prompt, 5, **sampling), submit("whole", [5, 6, 8], 5, allowed_token_ids=[9])])
    drain(engine, check=True)
    assert (published.ended["broken"].reason, published.ended["broken"].error) == ("error", OVERFLOW)
    assert "broken" not in published.tokens
    assert (published.ended["whole"].reason, published.tokens["whole"]) == ("length", [9] * 5)


def test_siblings_of_a_leader_that_overflows_end_too(folder):
    engine, published = make_engine(folder, max_num_batched_tokens=16, prefix_caching=False)
    family = [submit(name, [BROKEN] + [5] * 20, 5) for name in ("leader", "sibling")]
    hand_over(engine, [family[0], msgspec.structs.replace(family[1], fork_of="leader")])
    drain(engine, check=True)
    assert [published.ended[name].error for name in ("leader", "sibling")] == [OVERFLOW] * 2
