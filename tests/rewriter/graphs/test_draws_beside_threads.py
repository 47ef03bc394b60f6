"""Draws that are made again while other threads draw from the same stream."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import RandomStreamError
from remat.graph_capture.joint.exact_ops import DROPOUT
from remat.rewriter.graphs import rng
from remat.rewriter.graphs.rng import (
    draw_noting,
    form_with_generator,
    run_with_rng_state,
    save_rng_state,
)
from tests.limits import AMPLE_S
from tests.paths import ROOT

aten = torch.ops.aten
STEPS = 200
DRAWS = {
    "dropout": (DROPOUT, (torch.ones(50), 0.5, 2.0)),
    "randn": (aten.randn.default, ([7],)),
    "randint": (aten.randint.low, (1, 9, [5])),
    "randn_like": (aten.randn_like.default, (torch.ones(3),)),
    "multinomial": (aten.multinomial.default, (torch.ones(5), 3, True)),
    "normal": (aten.normal_functional.default, (torch.ones(17),)),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (*[torch.ones(1, 1, 4, 4)] * 3,),
    ),
}


class Dropped(nn.Module):
    """Its result says which mask forward drew, its gradients which one backward drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = (nn.Parameter(torch.ones(64, 64)) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x * self.weight) * self.scale


def drawing_again() -> nn.Module:
    module = remat.rematerialize(
        Dropped(), (torch.ones(64, 64),), budget="1GiB", recompute=["*"],
        solver="store_all", time_limit_s=AMPLE_S, check=False,
    )  # fmt: skip
    assert "run_with_rng_state" in module.code
    assert "draw_noting" in module.code
    return module


def has_one_mask(module: nn.Module, out: Tensor) -> bool:
    return all(p.grad is not None and torch.equal(p.grad, out) for p in module.parameters())


@contextmanager
def another_thread_draws() -> Generator[list[Tensor]]:
    """A thread that draws all the time, and what it drew."""
    drew: list[Tensor] = []
    ends = threading.Event()

    def draw() -> None:
        while not ends.wait(1e-3):
            drew.append(torch.rand(4))

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield drew
    finally:
        ends.set()
        thread.join()


def test_beside_a_thread_that_draws_each_step_has_one_mask_or_is_refused() -> None:
    module, x = drawing_again(), torch.ones(64, 64)
    same = refused = 0
    with another_thread_draws() as drew:
        for _ in range(STEPS):
            module.zero_grad()
            out = module(x)
            try:
                out.sum().backward()
            except RandomStreamError:
                refused += 1
                continue
            assert has_one_mask(module, out)
            same += 1
    assert same > 10 * refused
    assert len({tuple(one.tolist()) for one in drew}) == len(drew), "no draw of the thread repeats"


def test_two_threads_with_a_plan_each_are_never_refused() -> None:
    wrong: list[object] = []

    def train(module: nn.Module) -> None:
        x = torch.ones(64, 64)
        for _ in range(STEPS // 4):
            module.zero_grad()
            out = module(x)
            try:
                out.sum().backward()
            except RandomStreamError as error:
                wrong.append(error)
            if not has_one_mask(module, out):
                wrong.append("another mask")

    modules = [drawing_again() for _ in range(2)]
    threads = [threading.Thread(target=train, args=(module,)) for module in modules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


WAITING = """
import gc, threading, time
from remat.rewriter.graphs.rng import save_rng_state, set_rng_state

def work():
    for _ in range(200):
        set_rng_state(save_rng_state())

gc.callbacks.append(lambda *_: time.sleep(1e-4))  # another thread runs
gc.set_threshold(1)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
"""
"""Two threads save states, and garbage is collected at every object that is made."""


def test_threads_that_save_states_do_not_wait_for_each_other() -> None:
    subprocess.run([sys.executable, "-c", WAITING], cwd=ROOT, timeout=AMPLE_S, check=True)


def test_a_first_draw_beside_another_is_made_anew_once_it_is_known_how_far_it_moves() -> None:
    op, state, others = aten.rand.default, save_rng_state(), [0, 3, 1]
    form = beside(op, others)
    draw_noting(state, "cpu", form, [3])  # the first says nothing of how far
    run_with_rng_state(state, "cpu", op, [3])
    rng._learn((form, repr([[3]])), 3)
    first = draw_noting(state, "cpu", form, [3])
    assert others == [], "twice another thread drew, as it seemed"
    assert torch.equal(run_with_rng_state(state, "cpu", op, [3]), first)


def test_beside_a_thread_that_always_draws_the_first_draw_is_refused() -> None:
    form = beside(aten.rand.default, [1] * rng.TRIES)
    rng._learn((form, repr([[3]])), 3)
    with pytest.raises(RandomStreamError, match=r"another thread drew .* must draw alone"):
        draw_noting(save_rng_state(), "cpu", form, [3])


def beside(op: Any, others: list[int]) -> Any:
    """An op beside another thread that draws so many numbers meanwhile, at each call."""

    def run(shape: list[int]) -> Tensor:
        torch.rand(others.pop(0)) if others else None
        return op(shape)

    return run


def test_a_draw_between_the_state_and_the_first_draw_is_refused_by_the_name_of_the_op() -> None:
    state = save_rng_state()

    def draws_in_between(generator_free: int) -> Tensor:
        torch.rand(generator_free)  # as another thread would, between the state and the draw
        return torch.rand(3)

    draw_noting(state, "cpu", draws_in_between, 1)
    with pytest.raises(RandomStreamError, match=r"torch\.Generator.*another thread drew.*rand"):
        run_with_rng_state(state, "cpu", aten.rand.default, [3])


@pytest.mark.parametrize("name", DRAWS)
def test_each_is_drawn_again_and_the_stream_is_left_alone(name: str) -> None:
    op, args = DRAWS[name]
    state = save_rng_state()
    first = draw_noting(state, "cpu", op, *args)
    after = save_rng_state()
    again = run_with_rng_state(state, "cpu", op, *args)
    assert torch.equal(save_rng_state(), after)
    pairs = zip(*((r,) if isinstance(r, Tensor) else r for r in (first, again)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def test_a_state_without_a_note_is_drawn_from_as_it_is() -> None:
    state = save_rng_state()
    first = torch.rand(3)
    assert torch.equal(run_with_rng_state(state, "cpu", aten.rand.default, [3]), first)


def test_the_overload_with_a_generator_is_found() -> None:
    assert form_with_generator(aten.randint.low) is aten.randint.low_generator
    assert form_with_generator(aten.bernoulli.default) is aten.bernoulli.default
    assert form_with_generator(torch.rand) is None
