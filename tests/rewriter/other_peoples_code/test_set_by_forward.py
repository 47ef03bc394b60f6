"""Attributes, parameters and flags that forward sets."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError
from tests.rewriter.other_peoples_code.small_models import WIDTH, Base, batch, gradients, planned


def test_a_tensor_that_forward_sets_is_set_by_each_step_and_can_be_trained_with() -> None:
    class Auxiliary(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.auxiliary = y.square().mean()
            self.parts = {"mean": y.mean(), "name": "y"}
            return y.mean()

    model, x = Auxiliary(), batch()
    fast = planned(model, x)
    eager = gradients(model, lambda: model(x) + model.auxiliary)
    kept = model.auxiliary.detach().clone()
    del model.auxiliary, model.parts
    ours = gradients(model, lambda: fast(x) + fast.auxiliary)
    assert all(map(torch.equal, eager, ours))
    assert torch.equal(model.auxiliary, kept)
    assert model.parts["name"] == "y"


def test_a_mask_that_is_made_at_the_first_call_is_planned_and_kept() -> None:
    class Masked(Base):
        mask: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones(WIDTH, WIDTH).tril()
            return self.linear(x) @ self.mask

    model, x = Masked(), batch()
    fast = planned(model, x)
    assert model.mask is None
    ours = fast(x)
    assert isinstance(model.mask, Tensor)
    assert torch.equal(ours, model(x))


def test_what_forward_would_read_again_from_its_batch_is_refused() -> None:
    class Remembering(Base):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            before = x if self.last is None else self.last
            self.last = x
            return self.linear(before)

    with pytest.raises(CaptureError, match=r"if last is only set once"):
        remat.capture(Remembering(), (batch(),))


def test_what_forward_sets_and_reads_in_one_call_is_carried() -> None:
    class Noting(Base):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.linear(x)
            return self.last.square().mean()

    model, x = Noting(), batch()
    fast = planned(model, x)
    fast(x)
    ours = model.last
    model(x)
    assert isinstance(ours, Tensor)
    assert torch.equal(ours, model.last)


def test_parameters_that_forward_writes_are_put_back_by_the_check() -> None:
    class Momentum(Base):
        def __init__(self) -> None:
            super().__init__()
            self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(self.linear.weight, alpha=0.1)
            return (self.linear(x) - self.slow(x)).square().mean()

    model, x = Momentum(), batch()
    before = model.slow.weight.clone()
    planned(model, x)
    assert torch.equal(model.slow.weight, before)


def test_a_flag_that_is_set_once_is_set_by_each_step() -> None:
    class Config:
        kind: str | None = None

    class Choosing(Base):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()
            self.is_set = False

        def forward(self, x: Tensor) -> Tensor:
            if self.config.kind is None:
                self.config.kind = "mean"
            self.is_set = self.is_set or True
            return getattr(self.linear(x), self.config.kind)()

    model, x = Choosing(), batch()
    fast = planned(model, x)
    assert model.config.kind is None
    for _ in range(2):
        assert torch.equal(fast(x), model(x))
        assert (model.config.kind, model.is_set) == ("mean", True)


def test_a_first_call_that_initialises_something_is_refused() -> None:
    class Initialised(Base):
        is_ready = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            if not self.is_ready:
                self.is_ready = True
                y = y / y.std()
            return y.mean()

    model, x = Initialised(), batch()
    with pytest.raises(CaptureError, match="if is_ready is only set once"):
        remat.capture(model, (x,))
    model(x)
    assert torch.equal(planned(model, x)(x), model(x))


def averaged_by_data(model: nn.Module) -> None:
    for own, other in zip(model.teacher.parameters(), model.linear.parameters(), strict=True):
        own.data = own.data * 0.9 + other.data * 0.1


def averaged_by_vectors(model: nn.Module) -> None:
    own = nn.utils.parameters_to_vector(model.teacher.parameters())
    nn.utils.vector_to_parameters(own.detach() * 0.9, model.teacher.parameters())


def averaged_by_set(model: nn.Module) -> None:
    with torch.no_grad():
        model.teacher.weight.set_(model.teacher.weight * 0.9)


def averaged_by_copy(model: nn.Module) -> None:
    for own, other in zip(model.teacher.parameters(), model.linear.parameters(), strict=True):
        own.data.copy_(own.data * 0.9 + other.data * 0.1)


class Averaged(Base):
    """A teacher whose weights are averages of the student's, as in MoCo and BYOL."""

    def __init__(self, average: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.linear).requires_grad_(False)
        self.average = average

    def forward(self, x: Tensor) -> Tensor:
        self.average(self)
        return (self.linear(x) - self.teacher(x)).square().mean()


@pytest.mark.parametrize("average", [averaged_by_data, averaged_by_vectors, averaged_by_set])
def test_other_data_of_a_parameter_is_refused_with_the_way_out(
    average: Callable[[nn.Module], None],
) -> None:
    model = Averaged(average)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError, match=r"(?s)tensor\.data\.copy_\(other\).*other data"):
        planned(model, batch())
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_the_way_out_of_other_data_trains_as_eager() -> None:
    eager = Averaged(averaged_by_copy)
    model = copy.deepcopy(eager)
    module, x = planned(model, batch()), batch()
    for one in (eager, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(x).backward()
            optimizer.step()
    for name, tensor in eager.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
