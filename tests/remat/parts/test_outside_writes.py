"""A model in parts that writes to tensors which no watched step could put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError
from tests.remat.parts.models import WIDTH, Branching, rows

SEEN = torch.ones(3)


class Noting(nn.Module):
    """A block that looks at its values, and then writes what it is told to."""

    def __init__(self, note: Callable[[Any], object]) -> None:
        super().__init__()
        self.block, self.note, self.listed = Branching(), note, [torch.ones(3)]
        self.register_buffer("known", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        made = self.block(x)
        self.note(self)
        return made.square().mean()


def planned(model: nn.Module) -> Any:
    return remat.rematerialize(model, (rows(),), budget="100%", verbose=False)


WRITES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a global": ("global SEEN", lambda model: SEEN.add_(1)),
    "an item of a global": ("global SEEN", lambda model: SEEN[0].add_(1)),
    "out=": ("global SEEN", lambda model: torch.add(SEEN, 1, out=SEEN)),
    "one in a list": ("listed", lambda model: model.listed[0].mul_(2)),
}


@pytest.mark.parametrize("write", WRITES)
def test_such_a_write_is_refused_and_put_back(write: str) -> None:
    name, note = WRITES[write]
    model = Noting(note)
    with pytest.raises(CaptureError, match=rf"register .*{name}.*as a buffer") as said:
        planned(model)
    assert "test_outside_writes.py" in str(said.value)
    assert torch.equal(SEEN, torch.ones(3))
    assert torch.equal(model.listed[0], torch.ones(3))


def to_its_own(model: Any) -> None:
    model.known.add_(1)
    made = torch.tensor([1.0, 2.0])
    made[0] = 3
    torch.zeros(2)[0].add_(made[1])
    torch.from_numpy(np.ones(3)).mul_(2)
    model.last = torch.zeros(WIDTH)
    model.last.add_(1)


def test_buffers_and_tensors_of_the_step_are_written_as_before() -> None:
    model = Noting(to_its_own)
    module = planned(model)
    assert torch.equal(model.known, torch.ones(3))
    module(rows()).backward()
    assert torch.equal(model.known, torch.full((3,), 2.0))
