"""Steps with copies that fail, are left half-way or run in other ways: right bits, nothing left."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.graph_capture.errors import TierError
from remat.graph_capture.spill_files import HOST_FOLDER, File
from remat.rewriter.checking.check import check
from remat.rewriter.user_module.module import RematModule
from tests.limits import AMPLE_S
from tests.paths import ROOT
from tests.rewriter.tiers.plans import (
    Copied,
    after_backward,
    copied,
    is_clean,
    is_closed,
    open_files,
    same,
    settled,
    step,
)

SCRIPT = Path(__file__).parent / "trained_on_and_on.py"


@functools.cache
def plan() -> Copied:
    return copied()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the host, in which nothing is left once a test has ended."""
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path))
    yield tmp_path
    assert is_clean(tmp_path)


@pytest.fixture
def module(folder: Path) -> RematModule:
    return plan().module()


def trains_as_eager(module: RematModule) -> bool:
    return same(step(module, plan().args), step(plan().model, plan().args))


def fail_at(count: int, name: str, patch: pytest.MonkeyPatch) -> None:
    """Let the `count`-th copy of a kind fail as on a full disk."""
    real, calls = getattr(File, name), list[int]()

    def failing(self: File, address: int) -> None:
        calls.append(address)
        if len(calls) == count:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, address)

    patch.setattr(File, name, failing)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_copy_that_fails_in_forward_is_told_where_the_step_runs(
    count: int, module: RematModule, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_at(count, "write_from", patch)
        with pytest.raises(TierError, match=r"copied between tiers.*No space left") as caught:
            module(*plan().args)
        assert isinstance(caught.value.__cause__, OSError)
    del caught
    assert is_clean(folder)
    assert trains_as_eager(module)


@pytest.mark.parametrize("count", [1, 3])
def test_a_copy_that_fails_in_backward_is_told_where_the_step_runs(
    count: int, module: RematModule, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = module(*plan().args)
    with monkeypatch.context() as patch:
        fail_at(count, "read_to", patch)
        with pytest.raises(TierError, match="No space left") as caught:
            loss.backward()
    del loss, caught
    assert is_clean(folder)
    assert trains_as_eager(module)


def test_a_copy_that_fails_is_told_once(
    module: RematModule, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither by Python's hook for threads nor when what waits for it is dropped."""
    with monkeypatch.context() as patch:
        fail_at(1, "write_from", patch)
        with pytest.raises(TierError):
            module(*plan().args)
    settled()
    assert "No space left" not in "".join(capfd.readouterr())


def test_an_error_holds_no_file_once_it_is_dropped(
    module: RematModule, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's collector, which cannot see through a tensor, has nothing to do with it."""
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            fail_at(3, "write_from", patch)
            with contextlib.suppress(TierError):
                module(*plan().args)
        assert is_closed(folder)
    finally:
        gc.enable()


def test_a_forward_without_backward_leaves_nothing(module: RematModule, folder: Path) -> None:
    loss = module(*plan().args)
    settled()
    assert open_files(folder) > 0
    del loss
    assert is_clean(folder)


def test_a_second_backward_over_one_forward_has_the_same_bits(module: RematModule) -> None:
    wanted = step(plan().model, plan().args)
    torch.manual_seed(3)
    loss = module(*plan().args)
    assert same(after_backward(module, loss, retain_graph=True), wanted)
    assert same(after_backward(module, loss, retain_graph=True), wanted)
    assert same(after_backward(module, loss), wanted)


def test_two_forwards_in_flight_do_not_meet(module: RematModule) -> None:
    wanted = [step(plan().model, plan().args, seed) for seed in (5, 6)]
    losses: list[Any] = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        losses.append(module(*plan().args))
    streams = [wanted[1][-1]] * 2  # both forwards have drawn by then
    for loss, bits, stream in zip(losses, wanted, streams, strict=True):
        assert same(after_backward(module, loss), [*bits[:-1], stream])


def test_without_gradients_the_users_own_forward_runs(module: RematModule, folder: Path) -> None:
    with torch.no_grad():
        torch.manual_seed(3)
        loss = module(*plan().args)
    torch.manual_seed(3)
    assert torch.equal(loss, plan().model(*plan().args))
    assert open_files(folder) == 0


def test_copies_and_pickles_of_the_module_train_as_eager(module: RematModule) -> None:
    wanted = step(plan().model, plan().args)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.schedule.moves
        assert same(step(again, plan().args), wanted)


@pytest.mark.parametrize("name", ["write_from", "read_to"])
@pytest.mark.parametrize("count", [1, 3])
def test_ctrl_c_in_the_middle_of_a_copy(
    name: str, count: int, module: RematModule, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(File, name), list[int]()

    def interrupting(self: File, address: int) -> None:
        calls.append(address)
        # Again after some steps: Python drops one that falls into a callback.
        if (len(calls) - count) % 40 == 0:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, address)

    with monkeypatch.context() as patch:
        patch.setattr(File, name, interrupting)
        # pytest would hold one that falls into a callback, and with it all that was running.
        patch.setattr(sys, "unraisablehook", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            train_until_interrupted(module)
    assert is_clean(folder)
    assert trains_as_eager(module)


def train_until_interrupted(module: RematModule) -> None:
    end = time.monotonic() + AMPLE_S
    while time.monotonic() < end:
        module(*plan().args).backward()


def test_steps_in_several_threads(module: RematModule) -> None:
    """Links are shared; what is copied is not."""
    model = plan().model
    model.zero_grad()
    torch.manual_seed(0)
    losses = [module(*plan().args) for _ in range(3)]
    found: list[list[Any]] = []

    def backward(loss: Any) -> None:
        found.append(list(torch.autograd.grad(loss, list(module.parameters()))))

    threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.manual_seed(0)
    wanted = [torch.autograd.grad(model(*plan().args), list(model.parameters())) for _ in losses]
    for gradients in found:
        assert any(all(map(torch.equal, gradients, one)) for one in wanted)
    assert len(found) == 3


def test_copies_take_part_in_the_check(module: RematModule) -> None:
    found = check(plan().model, module, plan().args, steps=2)
    assert found.equal
    assert found.gradients == found.gradients_total


def child(folder: Path, how: str) -> subprocess.Popen[str]:
    """A process that trains with copies to that folder; it says when it does."""
    environment = {**os.environ, HOST_FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), how], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "going"
    return process


def test_kill_leaves_no_file(folder: Path) -> None:
    with child(folder, "forever") as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not list(folder.iterdir())


def test_a_process_ends_with_copies_under_way(folder: Path) -> None:
    with child(folder, "once") as process:
        assert process.wait(AMPLE_S) == 0
    assert not list(folder.iterdir())
