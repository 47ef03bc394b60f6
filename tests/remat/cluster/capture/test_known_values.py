"""On the meta device, what is computed from no data has the values of a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from remat.cluster.capture.known_values import on_meta


def counts_one_sequence() -> bool:
    positions = torch.arange(12)[None]
    begins = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
    return bool((begins.cumsum(-1)[:, -1] == 0).all())


def rows_of_a_mask() -> int:
    mask = torch.ones(6, 6).tril() > 0
    return torch.nonzero(mask).shape[0]


def a_view_written_to() -> bool:
    x = torch.zeros(4)
    part = x[:2]
    x += 1
    return bool(part.sum() > 0)


def a_mask_filled_in_place() -> int:
    mask = torch.zeros(4, 4)
    mask.masked_fill_(torch.ones(4, 4).tril() > 0, 1.0)
    mask[2:].fill_(2)
    return int(mask.sum().item())


def written_with_what_is_unknown() -> bool:
    x = torch.zeros(4)
    x[1:].add_(torch.rand(3))
    return bool(x.sum() > 0)


def a_large_view_written_to() -> bool:
    x = torch.zeros(2, 1)
    x.expand(2, 1 << 20)[:, :1].fill_(1)
    return bool(x.sum() > 0)


def a_counter_elsewhere() -> bool:
    positions = torch.arange(3)
    torch.empty(2).add_(1)
    return bool((positions == 2).any())


def a_number() -> float:
    return torch.full((2,), 3.0).mul(2).sum().item()


def equal_tensors() -> bool:
    return torch.equal(torch.arange(3), torch.ones(3, dtype=torch.int64).cumsum(0) - 1)


@pytest.mark.parametrize("run",
    [
        counts_one_sequence, rows_of_a_mask, a_number, equal_tensors, a_view_written_to,
        a_mask_filled_in_place, a_counter_elsewhere,
    ],
)  # fmt: skip
def test_a_model_that_asks_its_own_numbers_gets_their_values(run: Callable[[], object]) -> None:
    expected = run()
    with on_meta(looks_at_data=False):
        assert run() == expected


@pytest.mark.parametrize(
    "run",
    [
        lambda: bool(torch.empty(2).sum() > 0),
        lambda: torch.rand(2).sum().item(),
        lambda: torch.arange(1 << 20).sum().item(),
        written_with_what_is_unknown,
        a_large_view_written_to,
    ],
)
def test_what_has_no_known_values_cannot_be_looked_at(run: Callable[[], object]) -> None:
    with on_meta(looks_at_data=False), pytest.raises((RuntimeError, NotImplementedError)):
        run()


def test_data_have_no_values() -> None:
    with on_meta(looks_at_data=False):
        given = torch.ones(3)
        assert torch.ones(2).sum().item() == 2
    with on_meta(looks_at_data=False), pytest.raises(RuntimeError):
        (given + torch.ones(3)).sum().item()
