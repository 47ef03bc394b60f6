"""What is refused before anything runs, with its line and a way out."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.graph_capture.errors import CaptureError, RewriteError
from remat.ranks.same_order import agreed_rewrite
from tests.rewriter.other_peoples_code.small_models import WIDTH, Base, batch, planned


@pytest.mark.parametrize(
    ("draw", "stream"),
    [(random.random, "random"), (lambda: np.random.rand(), "numpy.random")],
    ids=["python", "numpy"],
)
def test_draws_of_other_streams_are_refused_with_their_line(
    draw: Callable[[], float], stream: str
) -> None:
    class Drawing(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * draw()

    state, array = random.getstate(), np.random.get_state()[1].copy()
    with pytest.raises(CaptureError, match=rf"draws from {stream} \(.*test_refused\.py:\d+"):
        remat.capture(Drawing(), (batch(),))
    assert random.getstate() == state
    assert np.array_equal(np.random.get_state()[1], array)


def test_a_seed_set_in_forward_is_refused_with_its_line() -> None:
    class Seeded(Base):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(0)
            return nn.functional.dropout(self.linear(x))

    with pytest.raises(
        CaptureError, match=r"call torch\.manual_seed outside .*test_refused\.py:\d+"
    ):
        remat.capture(Seeded(), (batch(),))


def test_a_hook_that_forward_sets_and_that_keeps_something_is_refused() -> None:
    class Watching(Base):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda g: self.seen.append(g.detach()))
            return y.mean()

    with pytest.raises(CaptureError, match=r"backward of Watching changes seen"):
        remat.capture(Watching(), (batch(),))


def test_what_torch_cannot_take_apart_is_refused_with_the_call_that_helps() -> None:
    @dataclasses.dataclass
    class Batch:
        x: Tensor

    class Taking(Base):
        def forward(self, given: Batch) -> Tensor:
            return self.linear(given.x)

    with pytest.raises(CaptureError, match=r"register_dataclass\(Batch\): args\[0\] is a .*Batch"):
        remat.capture(Taking(), (Batch(batch()),))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_buffer_written_inside_a_checkpoint_is_refused_with_the_way_out(
    use_reentrant: bool,
) -> None:
    class Checkpointed(Base):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

        def forward(self, x: Tensor, is_checkpointed: bool = True) -> Tensor:
            h = self.linear(x)
            if is_checkpointed:
                return checkpoint(self.block, h, use_reentrant=use_reentrant)
            return self.block(h)

    model, x = Checkpointed(), batch()
    says = r"block\.1\.running_mean inside checkpoint"
    with pytest.raises(CaptureError, match=says):
        remat.capture(model, (x,))
    assert planned(model, x, False)(x, False).shape == x.shape


def test_no_schedule_is_no_plan() -> None:
    model, x = Base().linear, batch()
    remat.capture(model, (x,))
    with pytest.raises(RewriteError, match="no schedule to rewrite to"):
        agreed_rewrite(model, None)  # type: ignore[arg-type]


def test_what_a_solve_returns_is_no_schedule_and_the_way_out_works() -> None:
    model, x = Base().linear, batch()
    graph = remat.capture(model, (x,))
    lost, found = remat.solve(graph, 1), remat.solve(graph, "min")
    assert lost.schedule is None
    assert f"{lost.least_feasible_bytes} bytes are known to be enough" in lost.message
    with pytest.raises(RewriteError, match=r"only Plan\(infeasible.* result.message says what"):
        agreed_rewrite(model, lost)  # type: ignore[arg-type]
    with pytest.raises(RewriteError, match=r"pass the schedule in it"):
        agreed_rewrite(model, found)  # type: ignore[arg-type]
    assert found.schedule is not None
    assert torch.equal(agreed_rewrite(model, found.schedule)(x), model(x))


def test_an_option_that_draws_is_named_as_the_way_out_of_a_branch_on_a_random_number() -> None:
    class LayerDrop(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum() if torch.rand([]) < 0.5 else x.sum()

    with pytest.raises(CaptureError, match=r"(?s)layerdrop.*to 0.*a random number"):
        planned(LayerDrop(), batch())


def test_code_that_catches_what_only_a_trace_raises_is_refused() -> None:
    class Careful(Base):
        def forward(self, x: Tensor) -> Tensor:
            try:
                scale = 2.0 if x.sum() > 0 else 1.0
            except RuntimeError:
                scale = 3.0
            return self.linear(x).sum() * scale

    with (
        pytest.warns(UserWarning, match="traced as if under torch.compile"),
        pytest.raises(RewriteError),
    ):
        planned(Careful(), batch())
