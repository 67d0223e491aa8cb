"""The error of served weights is measured at the start, and stands beside the speed."""

import msgspec
import pytest

from sojourn.engine.config import EngineConfig, complaint, model_folder
from sojourn.engine.core import build
from sojourn.metrics.errors import ModelError

SETTINGS = {"model": "tiny-model", "threads": 1, "dtype": "float32", "num_kv_blocks": 64, "max_model_len": 256}


def ready(**settings):
    return build(EngineConfig(**(SETTINGS | settings)), 0, lambda message: None)[1]


@pytest.mark.compiler  # the bounds are those of our kernels
def test_rounded_weights_have_an_error_and_exact_ones_have_none():
    exact, rounded = (ready(weights=weights, weights_reference="self") for weights in ("float32", "int8"))
    assert exact.weight_error.divergence_nats < 1e-6 and exact.weight_error.greedy_agreement == 1.0
    assert 1e-4 < rounded.weight_error.divergence_nats < 0.01  # seen: 0.0010
    assert 0.95 < rounded.weight_error.greedy_agreement < 1.0
    assert rounded.weight_error.num_tokens == 255
    assert rounded.weight_error.sentence().startswith("0.00")
    assert msgspec.to_builtins(rounded)["weight_error"]["reference"] == "self"


def test_error_is_not_measured_unless_it_is_asked_for():
    assert ready().weight_error is None


def test_reference_of_another_vocabulary_is_refused(checkpoints):
    with pytest.raises(ModelError, match=r"has a vocabulary of 320 and the model one of 2,560; give the model"):
        ready(weights_reference=str(checkpoints["llama"]))


def test_random_weights_have_no_error():
    with pytest.raises(ValueError) as refused:
        EngineConfig(**SETTINGS, load_format="dummy", weights_reference="self")
    assert complaint(refused.value) == (
        "load_format='dummy' is not valid: random weights have no error; leave weights_reference out"
    )


def test_reference_may_be_the_folder_of_the_unquantised_model():
    folder = str(model_folder("tiny-model"))
    assert ready(weights="int8", weights_reference=folder).weight_error.reference == folder
