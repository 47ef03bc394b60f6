"""What backward reads to make values again, changed between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import RewriteError
from remat.rewriter.guards.live_state import (
    BYTES_A_US,
    LEAST_US,
    LINE_BYTES,
    WHOLE_STEPS,
    RecomputeInputs,
    _added_on_device,
)

WIDTH, ROWS = 16, 8
OPTIONS: dict[str, Any] = {
    "budget": "100%", "solver": "store_all", "recompute": "*", "check": False,
}  # fmt: skip


class Net(nn.Module):
    """Eager saves neither its argument nor its table, but what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("table", torch.ones(WIDTH, dtype=torch.bfloat16))
        self.plain = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers(x.float() / 255 + self.table.float()))
        return (h * (self.plain + 1)).sum()


def batch() -> Tensor:
    return torch.randint(0, 255, (ROWS, WIDTH), dtype=torch.uint8)


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 1.1


def copied_over(buffer: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(new)


CHANGES: dict[str, tuple[str, Callable[[Any, Tensor], object]]] = {
    "data, in place": ("layers.0.weight", lambda m, x: m.layers[0].weight.data.add_(0.1)),
    "one number": ("layers.0.weight", lambda m, x: m.layers[0].weight.data[3, 5].mul_(2)),
    "clamped": ("layers.0.weight", lambda m, x: m.layers[0].weight.data.clamp_(-0.1, 0.1)),
    "bias": ("layers.0.bias", lambda m, x: m.layers[0].bias.data.neg_()),
    "other data": ("layers.0.weight", lambda m, x: replaced(m.layers[0].weight)),
    "by an optimizer": (
        "layers.0.weight", lambda m, x: copied_over(m.layers[0].weight, torch.ones(WIDTH, WIDTH)),
    ),
    "buffer": ("table", lambda m, x: m.table.data.fill_(2)),
    "attribute": ("attribute plain", lambda m, x: m.plain.data.fill_(2)),
    "argument, copied over": (r"args\[0\]", lambda m, x: copied_over(x, batch())),
    "argument, by NumPy": (r"args\[0\]", lambda m, x: x.numpy().__setitem__(..., 0)),
    "argument, one number": (r"args\[0\]", lambda m, x: x.numpy().__setitem__((1, 2), 77)),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, remat.rematerialize(model, (batch(),), **OPTIONS)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_backward_is_refused_by_name(change: str, trained: Any) -> None:
    model, fast = trained
    name, made = CHANGES[change]
    x, state = batch(), {key: one.clone() for key, one in model.state_dict().items()}
    loss = fast(x)
    made(model, x)
    with pytest.raises(
        RewriteError, match=f"^change {name} after .*was changed between forward and backward"
    ):
        loss.backward()
    model.load_state_dict(state)


@pytest.mark.parametrize("after", [False, True])
def test_a_change_after_backward_is_none(after: bool, trained: Any) -> None:
    model, fast = trained
    x = batch()
    for _ in range(WHOLE_STEPS + 2):
        fast(x).backward()
        x.copy_(batch())
        model.layers[0].weight.data.mul_(0.9)
        if after:
            replaced(model.layers[0].weight)


def test_data_that_moves_with_the_same_bits_is_no_change(trained: Any) -> None:
    """As what brings parameters to another place between forward and backward."""
    model, fast = trained
    loss = fast(batch())
    model.layers[0].weight.data = model.layers[0].weight.data.clone()
    loss.backward()


def test_of_much_memory_a_part_is_read_and_all_of_it_at_first() -> None:
    weight = nn.Parameter(torch.zeros(1 << 20))
    watch = RecomputeInputs((0,), step_us=0.0)
    for _ in range(WHOLE_STEPS):
        noted = watch.noted(["weight"], [weight])
        weight.data[12345] += 1
        with pytest.raises(RewriteError, match=r"^change weight after backward"):
            watch.require(noted, "Net")
    noted = watch.noted(["weight"], [weight])
    assert weight.nbytes / 8 / noted[0].of_words * LINE_BYTES <= LEAST_US / 2 * BYTES_A_US
    weight.data += 1
    with pytest.raises(RewriteError, match=r"^change weight after backward"):
        watch.require(noted, "Net")


def test_of_many_tensors_each_has_its_turn() -> None:
    weights = [nn.Parameter(torch.zeros(300)) for _ in range(100)]
    watch = RecomputeInputs(range(100), step_us=0.0)
    names = [f"weight {i}" for i in range(100)]
    seen = set[str]()
    for _ in range(WHOLE_STEPS):
        watch.noted(names, weights)
    for _ in range(20):
        _, noted = watch.noted(names, weights)
        looked_at = [one.name for one in noted if one.bits is not None]
        assert len(looked_at) <= 17
        seen.update(looked_at)
    assert seen == set(names)


def test_memory_that_is_freed_after_forward_may_come_back_elsewhere() -> None:
    """As the parameters that FSDP gathers for forward, and again for backward."""
    weights = [nn.Parameter(torch.zeros(300)) for _ in range(100)]
    watch = RecomputeInputs(range(100), step_us=0.0)
    names = [f"weight {i}" for i in range(100)]
    for _ in range(WHOLE_STEPS + 1):
        noted = watch.noted(names, weights)
        before = [weight.data_ptr() for weight in weights]
        for weight in weights:
            weight.untyped_storage().resize_(0)
        others = [torch.empty(300) for _ in weights]
        for weight in weights:
            weight.untyped_storage().resize_(1200)
            weight.data.zero_()
        assert before != [weight.data_ptr() for weight in weights]
        del others
        watch.require(noted, "Block")


def test_a_long_step_leaves_time_to_read_all_of_it() -> None:
    weight = nn.Parameter(torch.zeros(1 << 20))
    watch = RecomputeInputs((0,), step_us=1e6)
    for _ in range(WHOLE_STEPS + 2):
        noted = watch.noted(["weight"], [weight])
    weight.data[12345] += 1
    with pytest.raises(RewriteError, match=r"^change weight after backward"):
        watch.require(noted, "Net")


def test_a_tensor_that_is_gone_is_not_held() -> None:
    watch = RecomputeInputs((0,), step_us=0.0)
    noted = watch.noted(["x"], [torch.ones(4)])
    assert noted[1][0].tensor() is None
    watch.require(noted, "Net")


def test_bits_on_a_device_are_added_up_in_any_order_of_dimensions() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for tensor in (image, torch.randn(5, 3), torch.randn(4, dtype=torch.bfloat16)):
        before = _added_on_device(tensor)
        assert before == _added_on_device(tensor.clone())
        tensor[0].mul_(3)
        assert before != _added_on_device(tensor)
    assert _added_on_device(torch.empty(0)) is None
