"""Whole steps that fail, or that are read between: nothing of the user's is lost."""

from __future__ import annotations

import copy
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from remat.graph_capture.errors import RematError, RewriteError, TierError
from remat.graph_capture.spill_files import HOST_FOLDER, File
from remat.whole_step import running
from remat.whole_step.running import WholeStep
from tests.remat.whole_step.loops import Training, chain, same
from tests.rewriter.tiers.plans import is_clean


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the host tier, in which nothing is left once a test has ended."""
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path))
    yield tmp_path
    assert is_clean(tmp_path)


def made(count: int = 2) -> tuple[Training, Training, WholeStep]:
    """A training, its twin in eager, and its step; all below the device that can be."""
    training = chain(count)
    return training, training.twin(), training.planned(budget=160_000, host="64MiB")


def test_what_is_below_is_empty_between_steps_and_comes_back_when_read() -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    other.eager(0, 1)
    assert any(one.numel() == 0 for one in training.model.parameters())
    assert same(training, other)  # by state_dict
    assert all(one.numel() for one in training.model.parameters())
    training.whole(step, 1, 1)
    other.eager(1, 1)
    (x,), _ = training.calls[0]
    assert torch.equal(training.model(x), other.model(x))
    assert same(training, other)


def test_copies_of_the_model_are_whole_or_refused() -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    other.eager(0, 1)
    with pytest.raises(RewriteError, match=r"call bring_back\(\).*cannot be copied or pickled"):
        copy.deepcopy(training.model)
    step.bring_back()
    copied = copy.deepcopy(training.model)
    training.whole(step, 1, 1)
    assert all(map(torch.equal, copied.state_dict().values(), other.model.state_dict().values()))


def test_what_cannot_be_read_back_stays_empty_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    other.eager(0, 1)

    def failing(file: File, address: int) -> None:
        raise OSError(5, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(File, "read_to", failing)
        with pytest.raises(TierError, match=r"could not be brought back .* and stay empty"):
            step.bring_back()
    assert all(one.numel() == 0 or one.sum() is not None for one in training.model.parameters())
    assert same(training, other)


def test_a_state_that_is_loaded_is_trained_on() -> None:
    training, other, step = made()
    kept = copy.deepcopy((other.model.state_dict(), other.optimizer.state_dict()))
    training.whole(step, 0, 1)
    training.model.load_state_dict(kept[0])
    training.optimizer.load_state_dict(kept[1])
    training.whole(step, 0, 2)
    other.eager(0, 2)
    assert same(training, other)


def test_close_and_deletion_bring_all_back(folder: Path) -> None:
    for end in ("close", "deletion", "with"):
        training, other, step = made()
        training.whole(step, 0, 1)
        other.eager(0, 1)
        if end == "close":
            step.close()
            assert is_clean(folder)
            with pytest.raises(RewriteError, match="is closed"):
                training.whole(step, 1, 1)
        elif end == "with":
            with step:
                pass
        del step
        gc.collect()
        assert all(one.numel() for one in training.model.parameters())
        assert same(training, other)
        other.eager(1, 1)
        training.eager(1, 1)  # eager trains on
        assert same(training, other)


@pytest.mark.parametrize("at", [1, 7, 23])
@pytest.mark.parametrize("method", ["write_from", "read_to"])
def test_a_copy_that_fails_leaves_all_in_memory(
    method: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    other.eager(0, 1)
    left, real = [at], getattr(File, method)

    def failing(file: File, address: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(5, "the disk is gone")
        real(file, address)

    monkeypatch.setattr(File, method, failing)
    with pytest.raises(TierError, match="could not be copied") as failed:
        training.whole(step, 1, 1)
    require_whole_or_said(failed.value, training, other)


def require_whole_or_said(error: BaseException, training: Training, other: Training) -> None:
    """All is in memory; what was not updated is as before, and the rest as after the step."""
    (note,) = [one for one in error.__notes__ if "memory" in one]
    before = copy.deepcopy(other.model.state_dict())
    other.eager(1, 1)
    after = other.model.state_dict()
    now = dict(training.model.named_parameters())
    new = [name for name in now if torch.equal(now[name], after[name])]
    old = [name for name in now if torch.equal(now[name], before[name])]
    assert sorted(new + old) == sorted(now)
    assert ("no parameter was updated" in note) == (not new)
    if new:
        assert f"remat: {len(new)} of {len(now)} parameters were updated" in note
    assert all(one.grad is None for one in now.values())


@pytest.mark.parametrize("at", [0, 5, 20, 45, 60])
def test_ctrl_c_between_any_actions(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    other.eager(0, 1)
    left, real = [at], running.StepRun._carry_out

    def interrupted(run: Any, action: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            signal.raise_signal(signal.SIGINT)
        real(run, action)

    with monkeypatch.context() as patch:
        patch.setattr(running.StepRun, "_carry_out", interrupted)
        with pytest.raises(KeyboardInterrupt) as failed:
            training.whole(step, 1, 1)
    require_whole_or_said(failed.value, training, other)


def test_ctrl_c_within_an_update_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    other.eager(0, 1)
    real = running.step_of

    def interrupted(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(running, "step_of", interrupted)
        with pytest.raises(KeyboardInterrupt) as failed:
            training.whole(step, 1, 1)
    assert "1 of " in failed.value.__notes__[-1]
    require_whole_or_said(failed.value, training, other)


def test_after_a_failure_before_any_update_the_step_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, other, step = made()

    def failing(run: Any, action: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(running.StepRun, "_resume", failing)
        with pytest.raises(MemoryError):
            training.whole(step, 0, 1)
    training.whole(step, 0, 2)
    other.eager(0, 2)
    assert same(training, other)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"args": [(torch.zeros(8, 32),)], "targets": [torch.zeros(8, 5)]},
         "takes 2 microbatches, and got 1"),
        ({"args": [(torch.zeros(8, 32),)] * 2}, "was captured with a target"),
        ({"args": [torch.zeros(8, 32)] * 2, "targets": [torch.zeros(8, 5)] * 2},
         r"write \[\(x,\) for x in batches\].* is a tuple of positional arguments"),
        ({"args": [(torch.zeros(8, 32),), (torch.zeros(9, 32),)],
          "targets": [torch.zeros(8, 5)] * 2}, r"\[9, 32\]"),
    ],
)  # fmt: skip
def test_other_batches_are_refused_in_one_line(given: dict[str, Any], says: str) -> None:
    training, other, step = made()
    training.whole(step, 0, 1)
    with pytest.raises(RematError, match=says) as refused:
        step(**given)
    assert "\n" not in str(refused.value)
    training.whole(step, 1, 1)
    other.eager(0, 2)
    assert same(training, other)


def test_gradients_that_are_there_and_eval_mode_are_refused() -> None:
    training, other, step = made()
    weight = training.model[0][0].weight
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(RewriteError, match=r"0.0.weight of Sequential already has a gradient"):
        training.whole(step, 0, 1)
    weight.grad = None
    training.model.eval()
    with pytest.raises(RewriteError, match="eval mode"):
        training.whole(step, 0, 1)
    training.model.train()
    training.whole(step, 0, 1)
    other.eager(0, 1)
    assert same(training, other)
