import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products on two threads wait for a core more than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
