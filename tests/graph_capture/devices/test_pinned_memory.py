"""Memory that a CUDA device can copy to by itself, and how its copies are timed."""

from __future__ import annotations

import gc

import pytest
import torch

from remat.graph_capture.devices.pinned_memory import copies_us, pinned
from remat.graph_capture.errors import TierError
from tests.fake_cuda import FakeCuda, cuda

__all__ = ["cuda"]


class Runtime:
    """The driver, which answers `status`."""

    def __init__(self, status: int) -> None:
        self.status, self.registered = status, set[int]()

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert (size_bytes, flags) == (8192, 1)
        if not self.status:
            self.registered.add(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.registered.remove(address)
        return 0


def test_pinned_memory_is_registered_as_long_as_anything_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = pinned(8192)
    part = memory[4096:]
    assert runtime.registered == {memory.data_ptr()}
    del memory
    assert runtime.registered
    del part
    gc.collect()
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_an_error_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(
        TierError, match=r"ulimit.*cannot pin the 8192 bytes.*cudaHostRegister says 2"
    ):
        pinned(8192)


def test_links_are_timed_with_the_memory_of_steps_which_is_given_back(cuda: FakeCuda) -> None:
    copies_us("cpu", 1 << 12)
    gc.collect()
    assert cuda.called["pin"] == cuda.called["unpin"] == 2
