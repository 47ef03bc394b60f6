"""Code that looks at the values of an argument, as at a mask of ones, to leave it away."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import remat
from tests.beside_eager import same_bits


class Masked(nn.Module):
    """As transformers has it: where nothing is masked, eager computes without the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if torch.compiler.is_compiling() or mask.sum() != mask.numel():
            hidden = hidden / 3 * mask[..., None] * 3
        return self.last(hidden).sum()


def model() -> Masked:
    torch.manual_seed(0)
    return Masked()


def batch(masked: int = 0) -> tuple[Tensor, Tensor]:
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[:, 8 - masked :] = 0
    return torch.randn(4, 8, 16), mask


def test_a_mask_of_ones_takes_eagers_way(recwarn: pytest.WarningsRecorder) -> None:
    own, args = model(), batch()
    step = remat.rematerialize(own, args, budget="100%")
    assert not [w for w in recwarn if "as if it were compiled" in str(w.message)]
    assert same_bits(own, step, args)
    (plan,) = remat.plans(step)
    assert "args[1]: int64[4, 8] on cpu, all 1" in plan.step.inputs
    with pytest.raises(remat.RematError, match=r"numbers of args\[1\], which were all 1 when"):
        step(*batch(masked=2))


def test_batches_take_turns_each_by_its_own_plan() -> None:
    own = model()
    step = remat.rematerialize(own, budget="100%")
    assert same_bits(own, step, batch())
    with pytest.warns(UserWarning, match="traced as if under torch.compile"):
        step(*batch(masked=2))
    for masked in (0, 3, 0, 2):
        assert same_bits(own, step, batch(masked))
    assert len(remat.plans(step)) == 2


def test_a_mask_of_any_other_number_counts_too() -> None:
    class Skips(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask) if mask.any() else self.last(self.first(x)).sum()

    torch.manual_seed(0)
    own, (x, mask) = Skips(), batch(masked=8)
    step = remat.rematerialize(own, (x, mask.bool()), budget="100%")
    assert same_bits(own, step, (x, mask.bool()))
    with pytest.raises(remat.RematError, match="were all False when"):
        step(x, ~mask.bool())


def test_a_kept_plan_is_held_to_the_same_values(tmp_path: Path) -> None:
    args = batch()
    remat.plans(remat.rematerialize(model(), args, budget="100%"))[0].save(tmp_path / "plan.json")
    own = model()
    step = remat.load(tmp_path / "plan.json").apply(own, args)
    assert same_bits(own, step, args)
    with pytest.raises(remat.RematError, match="were all 1 when"):
        step(*batch(masked=1))
    with pytest.raises(remat.PlanError, match="all 1"):
        remat.load(tmp_path / "plan.json").apply(model(), batch(masked=1))


def test_what_forward_writes_to_is_not_known() -> None:
    class Writes(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            own = mask.clone()
            own[:, 0] = x[:, 0, 0] > 0
            return super().forward(x, own)

    with pytest.warns(UserWarning, match="traced as if under torch.compile"):
        remat.capture(Writes(), batch())


def test_parameters_and_floats_are_never_taken_for_fixed() -> None:
    class Clips(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask) if x.max() < 5 else self.last(self.first(x)).sum()

    with pytest.raises(remat.CaptureError, match="values of args\\[0\\]"):
        remat.capture(Clips(), batch())
