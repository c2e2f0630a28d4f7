import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("steady", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Whatever started the tests may ignore SIGINT, as a shell's background does; what they start is to hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
