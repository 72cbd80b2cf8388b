"""A CUDA device for each test that asks for one: a GPU, and fake ones."""

from collections.abc import Iterator

import pytest
from cuda_devices import EVERY_CUDA, CudaDevice


@pytest.fixture(params=EVERY_CUDA)
def cuda(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    """A CUDA device of the kind that the test is parametrized with."""
    with request.param.opened() as device:
        yield device
