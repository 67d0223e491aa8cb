"""How many devices computed the model, from what servers say of themselves."""

import pytest

from sojourn.metrics.run.devices import num_devices, num_ranks


@pytest.mark.parametrize(
    ("engine", "more", "devices"),
    [
        ({"served": {"engine": {"tensor_parallel": 1, "pipeline_parallel": 1}}}, {}, 1),
        ({"tensor_parallel": 2, "served": {"engine": {"tensor_parallel": 1, "pipeline_parallel": 2}}}, {}, 4),
        ({"expert_parallel": 4, "tensor_parallel": 2}, {}, 4),  # the ranks of experts are those of tensors
        ({"tensor_parallel": 2, "data_parallel_size": 3}, {}, 6),
        ({"tensor_parallel": 2, "replicas": 3}, {"servers": [{"name": "server-0"}] * 4}, 6),  # one in another's place
        ({"tensor_parallel": 1}, {"servers": [{"name": "server-0"}, {"name": "server-1"}]}, 2),
        ({}, {}, None),
        ({"max_num_seqs": 4}, {"servers": [{"name": "server-0"}]}, None),
    ],
)
def test_devices_are_the_ranks_of_all_servers_and_unknown_where_no_server_says(engine, more, devices):
    meta = {"engine": engine} | more
    assert num_devices(meta) == devices
    assert num_ranks(meta) >= 1
