"""`rematerialize(blocks=, host=)`: eager's bits, the simulator's peak, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from examples.gpt import GPT, Sizes
from remat.blocks.rematerialized import planned_blocks
from remat.graph_capture.errors import BudgetError, FileError, TierError
from remat.graph_capture.spill_files import HOST_FOLDER, File, Folder
from remat.schedules.schedule import Offload
from tests.block_models import Stack, rows
from tests.fixed_costs import REPLACED, patched
from tests.limits import AMPLE_S
from tests.rewriter.tiers.plans import after_backward, is_clean, open_files, same, settled, step

SIZES = Sizes(layers=3, width=32, heads=2, seq=16, batch=8, vocab=64, dropout=0.1)


@dataclass
class Planned:
    """Blocks with dropout whose values all go through a folder, and the model that they are of."""

    model: nn.Module
    made: nn.Module
    args: tuple[Tensor, ...]
    folder: Path

    def trains_as_eager(self) -> bool:
        return same(step(self.made, self.args), step(self.model, self.args))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    folder = tmp_path_factory.mktemp("host")
    torch.manual_seed(0)
    model, args = Stack(), (rows(),)
    with patched(REPLACED), pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOST_FOLDER, str(folder))
        made = remat.rematerialize(
            model, args, blocks="layers.*", budget="min", host="64MiB", check=False
        )
    return Planned(model, made, args, folder)


@pytest.fixture
def planned(shared: Planned) -> Iterator[Planned]:
    """In whose folder nothing is left once a test has ended."""
    yield shared
    assert is_clean(shared.folder)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, drawn = GPT(SIZES), torch.randint(SIZES.vocab, (SIZES.batch, SIZES.seq + 1))
    return model, (drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())


def sent(made: nn.Module, tier: str = "host") -> int:
    """How many copies the blocks of a planned model begin in one step, down to a tier."""
    schedule = planned_blocks(made).result.schedule
    assert schedule is not None
    return sum(isinstance(one, Offload) and one.to == tier for one in schedule.steps)


def assert_as_planned(model: nn.Module, made: nn.Module, args: tuple[Tensor, ...]) -> None:
    result = planned_blocks(made).result
    found = remat.check(model, made, args, steps=2)
    assert found.differences == ()
    assert found.gradients == found.gradients_total
    assert found.plan_peak_bytes == result.peak_bytes <= result.budget_bytes


@pytest.mark.parametrize("budget", ["50%", pytest.param("min", marks=pytest.mark.slow)])
def test_bits_are_eagers_and_the_peak_is_the_judges(budget: str) -> None:
    model, args = gpt()
    given: dict[str, Any] = {"budget": budget, "check": False}
    made = remat.rematerialize(model, args, blocks="blocks.*", host="64MiB", **given)
    assert sent(made) > 3
    assert_as_planned(model, made, args)
    alone = planned_blocks(remat.rematerialize(model, args, blocks="blocks.*", **given)).result
    found = planned_blocks(made).result
    assert (found.peak_bytes, found.time_us) < (alone.peak_bytes, alone.time_us)
    assert planned_blocks(made).host_bytes > 0


@pytest.mark.slow
def test_the_host_is_shared_by_all_blocks_and_nvme_takes_the_rest(tmp_path: Path) -> None:
    model, args = gpt()
    given: dict[str, Any] = {"budget": "50%", "check": False}
    made = remat.rematerialize(model, args, blocks="blocks.*", host="100KiB", **given)
    assert 0 < planned_blocks(made).host_bytes <= 100 << 10
    assert_as_planned(model, made, args)
    nvme = f"{tmp_path}:64MiB"
    lower = remat.rematerialize(model, args, blocks="blocks.*", host="64KiB", nvme=nvme, **given)
    assert sent(lower, "nvme")
    assert planned_blocks(lower).nvme_bytes > 0 < planned_blocks(lower).host_bytes <= 64 << 10
    assert_as_planned(model, lower, args)
    assert is_clean(tmp_path)


def test_blocks_that_are_sharded_afterwards_are_planned_with_a_host() -> None:
    torch.manual_seed(0)
    made = remat.rematerialize(
        Stack(), (rows(),), blocks="layers.*", budget="60%", host="64MiB",
        sharding=remat.Sharding("fsdp2", 2), check=True,
    )  # fmt: skip
    assert sent(made)


def test_what_does_not_fit_names_the_least_budget_with_this_host(planned: Planned) -> None:
    least = planned_blocks(planned.made).result.peak_bytes
    with pytest.raises(
        BudgetError, match="the lowest peak that a schedule is known to reach"
    ) as caught:
        remat.rematerialize(
            planned.model, planned.args, blocks="layers.*", budget=least // 2, host="64MiB"
        )
    assert str(caught.value).count("\n") == 1


def test_a_folder_without_room_for_all_blocks_is_refused(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block alone would have room."""
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path))
    whole_bytes, asked = planned_blocks(planned.made).host_bytes, list[int]()
    monkeypatch.setattr(Folder, "require_room", lambda _, size_bytes: asked.append(size_bytes))
    again = remat.rematerialize(
        planned.model, planned.args, blocks="layers.*", budget="min", host="64MiB", check=False
    )
    assert asked[0] == planned_blocks(again).host_bytes == whole_bytes == max(asked)
    monkeypatch.setenv(HOST_FOLDER, str(tmp_path / "missing"))
    with pytest.raises(FileError, match=r"name a folder .*missing is not a folder") as caught:
        remat.rematerialize(
            planned.model, planned.args, blocks="layers.*", budget="min", host="64MiB", check=False
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "count"), [("write_from", 1), ("write_from", 7), ("read_to", 2)])
def test_a_copy_that_fails_is_told_and_leaves_nothing(
    name: str, count: int, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(File, name), list[int]()

    def failing(self: File, address: int) -> None:
        calls.append(address)
        if len(calls) == count:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, address)

    with monkeypatch.context() as patch:
        patch.setattr(File, name, failing)
        with pytest.raises(TierError, match=r"copied between tiers.*No space left") as caught:
            planned.made(*planned.args).backward()
    del caught
    assert is_clean(planned.folder)
    assert planned.trains_as_eager()


def test_a_forward_without_backward_leaves_nothing(planned: Planned) -> None:
    loss = planned.made(*planned.args)
    settled()
    assert open_files(planned.folder) > 0
    del loss
    assert is_clean(planned.folder)


def test_a_second_backward_over_one_forward_has_the_same_bits(planned: Planned) -> None:
    wanted = step(planned.model, planned.args)
    torch.manual_seed(3)
    loss = planned.made(*planned.args)
    assert same(after_backward(planned.made, loss, retain_graph=True), wanted)
    assert same(after_backward(planned.made, loss), wanted)


@pytest.mark.parametrize("name", ["write_from", "read_to"])
def test_ctrl_c_in_the_middle_of_a_copy(
    name: str, planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(File, name), list[int]()

    def interrupting(self: File, address: int) -> None:
        calls.append(address)
        # Again after some steps: Python drops one that falls into a callback.
        if len(calls) % 40 == 3:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, address)

    def train_until_interrupted() -> None:
        end = time.monotonic() + AMPLE_S
        while time.monotonic() < end:
            planned.made(*planned.args).backward()

    with monkeypatch.context() as patch:
        patch.setattr(File, name, interrupting)
        # pytest would hold one that falls into a callback, and with it all that was running.
        patch.setattr(sys, "unraisablehook", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            train_until_interrupted()
    assert is_clean(planned.folder)
    assert planned.trains_as_eager()
