"""Memory that a copy still writes to is not given back, whatever else is asked for meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.graph_capture.spill_files import File, Folder
from remat.whole_step.residents import Held

LATE_S = 0.2


@pytest.fixture
def held(tmp_path: Path) -> Held:
    """One tensor that is below."""
    folder = Folder(str(tmp_path), "host")
    held = Held("x", [torch.arange(1000.0)], {"host": folder, "nvme": folder})
    held.offload("host")
    held.leave()
    return held


@pytest.mark.parametrize("act", [
    Held.leave,
    Held.close,
    lambda held: held.forget_below("host"),
    lambda held: held.adopt([torch.ones(3)]),
])  # fmt: skip
def test_a_copy_into_memory_that_nobody_has_waited_for(
    act: Callable[[Held], None], held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, real, acted = list[int](), File.read_to, threading.Event()
    (whole,) = held.whole

    def late(file: File, address: int) -> None:
        acted.wait(LATE_S)
        sizes.append(whole.untyped_storage().nbytes())
        real(file, address)

    monkeypatch.setattr(File, "read_to", late)
    held.fetch("device")
    act(held)
    has_ended = list(sizes)
    acted.set()
    held.settle()
    assert has_ended == sizes == [4000]


def test_what_was_fetched_and_dropped_unread_is_fetched_again(held: Held) -> None:
    (x,) = held.tensors
    held.fetch("device")
    held.leave()
    held.rest()
    assert not held.is_in_memory
    assert not x.numel()
    held.restore()
    assert torch.equal(x, torch.arange(1000.0))


def test_the_file_of_a_copy_up_is_not_forgotten_before_it_was_read(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy would read a new, empty file."""
    begun, real = threading.Event(), held.files_at

    def late(tier: Any) -> Any:
        begun.wait(LATE_S)
        return real(tier)

    monkeypatch.setattr(held, "files_at", late)
    held.fetch("device")
    held.forget_below("host")
    begun.set()
    held.arrive()
    held.attach()
    assert torch.equal(held.tensors[0], torch.arange(1000.0))
