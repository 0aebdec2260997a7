"""The CPU device's thread pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.execution.device import CpuDevice


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_undivided_work_has_one_thread_and_the_rest_has_all() -> None:
    device = CpuDevice(2)
    assert torch.get_num_threads() == 2
    with device.undivided():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError), device.undivided():
        raise RuntimeError
    assert torch.get_num_threads() == 2
