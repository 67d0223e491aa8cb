"""Built from their published config.json, the models have the sizes that the counts of `metrics.compute` say."""

import pytest
import torch

from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.registry import FAMILIES, decoder_config
from sojourn.metrics.compute.model_catalog import published_models
from sojourn.metrics.compute.model_sizes import model_sizes
from sojourn.metrics.compute.rank_shape import rank_shape

OURS = {name: config for name, config in published_models().items() if config["architectures"][0] in FAMILIES}


@pytest.mark.parametrize("name", OURS)
def test_model_has_the_counted_size_and_cost(name):
    config = {key: value for key, value in OURS[name].items() if key != "quantization_config"}
    decoder, sizes = decoder_config({"hidden_act": "silu", "rms_norm_eps": 1e-5} | config), model_sizes(config)
    with torch.device("meta"):
        model = Decoder(decoder).to(torch.bfloat16)
    assert sum(each.numel() for each in model.parameters()) == sizes.parameters
    assert decoder.max_model_len == sizes.longest
    built, counted = model.shape(), rank_shape(sizes, "bf16", "bf16")
    for field in ("vocab_size", "hidden_size", "attention_parameters", "mlp_parameters", "pair_flops", "windows",
                  "kv_bytes_per_token", "experts"):  # fmt: skip
        assert getattr(built, field) == getattr(counted, field), field
    assert built.weight_bytes == pytest.approx(counted.weight_bytes, rel=2e-3)  # routers are float32 there
