"""A model with weights of four bits says what its dequantised weights say of the same rounded activations."""

import pytest
import torch

from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.cpp.matrices import groups_kernel
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.quantisation.rounding import round_to_nearest
from sojourn.engine.config import model_folder
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.text.tokenizer import Tokenizer
from tests.engine.compute.quantisation.test_cpu_groups import rounded
from tests.engine.harness import drain, hand_over, make_engine, submit

# Between the largest logit and the one chosen. Both ways compute an activation with errors of 1e-7, which may put it on
# either side of half a step of its rounding: a change of 1/127 of a group's largest number in one of thousands.
NEAR_TIE = 0.05
LENGTH = 60

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(library() is None or groups_kernel(library()) is None, reason="this machine has no such kernel"),
]


class Dequantised:
    """The product of torch, in float64, with the dequantised weight and the activations as the kernel rounds them."""

    def __init__(self, weight: torch.Tensor):
        self.matrix = round_to_nearest(weight)
        self.weight = self.matrix.dequantised().double()
        self.out_features, self.in_features = weight.shape
        self.nbytes = 0

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return (rounded(x, self.matrix) @ self.weight.T).float()

    def dequantised(self) -> torch.Tensor:
        return self.weight.float()


def test_greedy_tokens_are_those_of_the_dequantised_model_but_for_near_ties():
    text = (model_folder("tiny-model") / "prompts.txt").read_text(encoding="utf-8")
    prompt = Tokenizer(model_folder("tiny-model")).encode(text[:2000])[:40]
    engine, published = make_engine("tiny-model", weights="int4")
    assert engine.runner.eager.model.held_as == "int4"
    hand_over(engine, [submit("r", prompt, LENGTH)])
    drain(engine)
    tokens = published.tokens["r"]

    engine, published = make_engine("tiny-model", weights="float32")
    plain = load_model(model_folder("tiny-model"), torch.float32, torch.device("cpu"), None)
    for ours, source in zip(_linears(engine.runner.eager.model), _linears(plain), strict=True):
        assert source.bias is None
        ours.method = Dequantised(source.weight.detach())
    hand_over(engine, [submit("oracle", prompt + tokens, 1, prompt_logprobs=1)])
    drain(engine)
    entries = published.prompt_logprobs["oracle"][-LENGTH:]
    below = [entry.top[0][1] - entry.logprob for entry in entries]
    assert max(below) <= NEAR_TIE
    assert sum(gap > 0 for gap in below) <= LENGTH // 20  # near ties are few


def _linears(model: torch.nn.Module) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]
