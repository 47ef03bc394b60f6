"""What has no arena is told so, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.analysis.plan_figures import use_arena
from remat.graph_capture.errors import ArenaError, DeviceError, RematError
from remat.rewriter.arena.arena import Recorder, recorded
from remat.rewriter.compiled import StepAllocator
from tests.models import make
from tests.rewriter.arena.steps_in_arena import in_arena, module_of, needs_compiler


def test_a_module_that_is_not_rewritten() -> None:
    with pytest.raises(ArenaError, match=r"pass what remat\.rematerialize.*this is Linear"):
        use_arena(nn.Linear(2, 2), (torch.ones(2),))


@pytest.mark.parametrize("wrong", [1, None, "module"])
def test_what_is_no_module(wrong: Any) -> None:
    with pytest.raises(ArenaError, match=f"pass what .*this is {type(wrong).__name__}"):
        use_arena(wrong)


def test_eval_mode() -> None:
    with pytest.raises(ArenaError, match="eval mode"):
        use_arena(module_of("plain").eval(), make("plain")[1])


def test_another_device() -> None:
    module = module_of("plain").to("meta")
    with pytest.raises(DeviceError, match="arenas only work on the CPU"):
        use_arena(module, make("plain")[1])


def test_gradients_that_are_released() -> None:
    model, args, kwargs, loss_fn, target = make("plain")
    module = remat.rematerialize(
        model, args, kwargs, loss_fn=loss_fn, target=target, budget="100%", accumulate=True,
        check=False,
    )  # fmt: skip
    with pytest.raises(ArenaError, match="leave out one of the two: accumulate is not"):
        use_arena(module, args)


@needs_compiler
def test_a_second_arena() -> None:
    module, arena = in_arena("plain")
    with pytest.raises(ArenaError, match="close the module's arena first"):
        use_arena(module, make("plain")[1])
    arena.close()
    assert use_arena(module, make("plain")[1]).is_open


@needs_compiler
def test_a_batch_that_the_plan_does_not_know() -> None:
    module = module_of("plain")
    with pytest.raises(RematError):
        use_arena(module, (torch.ones(3, 3),))
    assert module._remat_compiled_step.memory.source is None
    assert use_arena(module, make("plain")[1]).is_open


@needs_compiler
def test_a_step_without_a_backward_or_with_two() -> None:
    memory = StepAllocator()
    backward = memory.around("backward", lambda args: [None])
    graph = memory.around("forward", lambda args: torch.ones(len(args)))
    with recorded(memory) as recorder:
        assert isinstance(memory.source, Recorder)
        graph([1])
        with pytest.raises(ArenaError, match="the backward of the rewritten step did not run"):
            recorder.requests()
        with pytest.raises(ArenaError, match="runs the forward of this module twice"):
            graph([1])
        backward([])
        with pytest.raises(ArenaError, match="continues after its graph has returned"):
            recorder.requests()
    assert memory.source is None
