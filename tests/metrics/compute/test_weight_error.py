"""The error of weights, read from run.json and shown."""

import msgspec

from sojourn.metrics.compute.weight_error import WeightError, weight_error_of
from sojourn.ui.markup.fragments import _weights

ERROR = WeightError("self", 1023, 0.0125, -0.002, 0.97)


def test_run_json_gives_it_back_and_other_contents_give_none():
    assert weight_error_of({"core": {"weight_error": msgspec.to_builtins(ERROR)}}) == ERROR
    for core in (None, {}, {"weight_error": None}, {"weight_error": {"reference": 3}}, []):
        assert weight_error_of({"core": core}) is None


def test_app_shows_the_format_and_its_error():
    core = {"weights": "int4", "dtype": "float32", "weight_error": msgspec.to_builtins(ERROR)}
    assert _weights({"core": core}) == [
        "weights int4",
        "0.0125 nats per token from self (Kullback-Leibler), the same greedy token in 97.0% of 1023",
    ]
    assert _weights({"core": {"weights": "float32", "dtype": "float32"}}) == []
