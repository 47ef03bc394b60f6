"""Draws on a CUDA device that are made again, beside threads that draw from the same stream.

The device is a fake: its stream is a seed and an offset, as Philox has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remat.graph_capture.errors import RandomStreamError
from remat.rewriter.graphs import rng
from remat.rewriter.graphs.rng import draw_noting, run_with_rng_state, save_rng_state, set_rng_state
from tests.fake_cuda import FakeCuda, cuda

__all__ = ["cuda"]
ONES = torch.ones(16, dtype=torch.uint8)


class FakeGenerator:
    """A generator of the device that is not there; its state is a seed and an offset."""

    def __init__(self, device: str) -> None:
        assert device == "cuda:0"
        self.state = torch.zeros(16, dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        assert state.nbytes == 16
        self.state = state.clone()

    def get_state(self) -> Tensor:
        return self.state.clone()


def numbers(state: Tensor, count: int) -> Tensor:
    """What is drawn from a state, which moves on."""
    seed_and_offset = state.numpy().view(np.int64)
    drawn_now = seed_and_offset[1] + np.arange(count)
    seed_and_offset[1] += count
    return torch.from_numpy(drawn_now)


class Draws:
    """An op that draws on the device, beside a thread that draws so many numbers at each call."""

    def __init__(self, fake: FakeCuda, others: tuple[int, ...] = ()) -> None:
        self.fake, self.others = fake, list(others)

    def __call__(self, count: int, generator: FakeGenerator | None = None) -> Tensor:
        if generator is not None:
            return numbers(generator.state, count)
        if self.others:
            numbers(self.fake.stream, self.others.pop(0))
        return numbers(self.fake.stream, count)


@pytest.fixture(params=[True, False], ids=["a generator of its own", "the default one"])
def draws(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, request: Any) -> type[Draws]:
    """Ops that take a generator, or that do not."""
    monkeypatch.setattr(torch, "Generator", FakeGenerator)
    form = (lambda op: op) if request.param else (lambda _: None)
    monkeypatch.setattr(rng, "form_with_generator", form)
    monkeypatch.setattr(rng, "_moves", {})
    return Draws


def test_a_draw_on_a_device_is_drawn_again_and_its_stream_is_left_alone(
    cuda: FakeCuda, draws: type[Draws]
) -> None:
    state, op = save_rng_state("cuda:0"), draws(cuda)
    numbers(cuda.stream, 5)
    first = draw_noting(state, "cuda:0", op, 3)
    assert first.tolist() == [5, 6, 7]
    numbers(cuda.stream, 9)
    now = cuda.stream.clone()
    assert torch.equal(run_with_rng_state(state, "cuda:0", op, 3), first)
    assert torch.equal(cuda.stream, now)


def test_a_draw_on_a_device_beside_another_is_refused_where_it_is_drawn_again(
    cuda: FakeCuda, draws: type[Draws]
) -> None:
    state = save_rng_state("cuda:0")
    draw_noting(state, "cuda:0", draws(cuda, (2,)), 3)
    with pytest.raises(RandomStreamError, match=r"torch\.Generator.*another thread drew"):
        run_with_rng_state(state, "cuda:0", draws(cuda), 3)


def test_a_first_draw_on_a_device_is_made_anew_once_it_is_known_how_far_it_moves(
    cuda: FakeCuda, draws: type[Draws]
) -> None:
    state, op = save_rng_state("cuda:0"), draws(cuda)
    draw_noting(state, "cuda:0", op, 3)
    run_with_rng_state(state, "cuda:0", op, 3)
    op.others = [2, 1]
    first = draw_noting(state, "cuda:0", op, 3)
    assert op.others == []
    assert torch.equal(run_with_rng_state(state, "cuda:0", op, 3), first)
    op.others = [1] * rng.TRIES
    with pytest.raises(RandomStreamError, match=r"another thread drew .* must draw alone"):
        draw_noting(state, "cuda:0", op, 3)


def test_states_of_a_device_are_put_back_without_their_note(cuda: FakeCuda) -> None:
    cuda.stream = ONES.clone()
    state = save_rng_state("cuda:0")
    draw_noting(state, "cuda:0", Draws(cuda), 1)
    set_rng_state(state, "cuda:0")
    assert torch.equal(cuda.stream, ONES)
