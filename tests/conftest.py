import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Many tiny tensors: one thread is faster than two."""
    torch.set_num_threads(1)
