"""What would go wrong without a sign: each is done exactly, or refused in words."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook

from remat.graph_capture import capture
from remat.graph_capture.devices.memory_events import measure_peak
from remat.graph_capture.errors import CaptureError, RewriteError
from remat.rewriter.rewriting import rewrite
from remat.rewriter.user_module.module import RematModule
from remat.schedules.simulate import simulate
from tests.behaviours.behaviours import Fails
from tests.behaviours.trainee import Trainee, differences, planned
from tests.models import make
from tests.steps import schedule_of


def rewritten(name: str) -> Trainee:
    eager, module = planned(name)
    return eager.with_module(copy.deepcopy(module))


@pytest.mark.parametrize("at_op", [3, 25])
def test_a_failed_step_leaves_nothing_allocated(at_op: int) -> None:
    """Memory runs out in an op of forward or of backward: the next step's peak is as planned."""
    model, args, *_ = make("dropout")
    graph = capture(model, args)
    plan = schedule_of(graph, "cut")
    it = Trainee(rewrite(model, plan), args, {})
    it.step()
    it.module.zero_grad()
    before = tensors_alive()
    with pytest.raises(MemoryError), Fails(MemoryError, at_op):
        it.module(*args).backward()
    it.module.zero_grad()
    assert tensors_alive() == before
    planned_bytes = simulate(graph, plan).peak_bytes - graph.resident.total_bytes
    assert measure_peak(lambda: it.module(*args).backward()) == planned_bytes


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_a_parameter_changed_between_forward_and_backward_is_refused_by_eager_and_a_plan() -> None:
    eager, module = planned("plain")
    named = "was changed between forward and backward"
    for one, error, said in (
        (eager.module, RuntimeError, "modified by an inplace operation"),
        (module, RewriteError, named),
    ):
        it = eager.with_module(copy.deepcopy(one))
        loss = it.loss()
        with torch.no_grad():
            for parameter in it.module.parameters():
                parameter.mul_(2)
        with pytest.raises(error, match=said):
            loss.backward()


def test_torch_compile_around_a_rewritten_module_keeps_its_bits() -> None:
    eager, module = planned("dropout")
    torch.manual_seed(3)
    it = eager.with_module(copy.deepcopy(eager.module))
    expected = it.observed(loss=it.step())
    torch.manual_seed(3)
    ours = eager.with_module(copy.deepcopy(module))
    compiled: Any = torch.compile(ours.module, backend="eager")
    loss = eager.with_module(compiled).step()
    assert differences(expected, ours.observed(loss=loss)) == []
    torch._dynamo.reset()


def to_channels_last(it: Trainee) -> None:
    it.module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def to_half(it: Trainee) -> None:
    it.module.to(torch.bfloat16)


def unfreeze(it: Trainee) -> None:
    it.module.requires_grad_(True)


def replace_a_layer(it: Trainee) -> None:
    it.module.body[0] = nn.Linear(64, 64)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("batch_norm_in_place_relu", to_channels_last, "of strides .* is of strides"),
        ("plain", to_half, "was torch.float32 .* is torch.bfloat16 now"),
        ("frozen_parameters", unfreeze, "was frozen .* is trained now"),
        ("plain", replace_a_layer, "a submodule .* is another one now"),
    ],
)
def test_a_module_that_is_not_as_captured_is_refused(
    name: str, change: Callable[[Trainee], None], text: str
) -> None:
    it = rewritten(name)
    change(it)
    with pytest.raises(RewriteError, match=text):
        it.step()


def test_an_input_that_requires_grad_only_now_is_refused() -> None:
    it = rewritten("plain")
    it.args = (it.args[0].clone().requires_grad_(),)
    with pytest.raises(RewriteError, match=r"args\[0\] = .* requires_grad"):
        it.step()


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        (torch.set_default_dtype, torch.float64, r"torch\.get_default_dtype\(\) was torch.float32"),
        (torch.backends.cuda.enable_flash_sdp, False, r"flash_sdp_enabled\(\) was True"),
        (torch.backends.cuda.enable_cudnn_sdp, False, r"cudnn_sdp_enabled\(\) was True"),
        (torch.use_deterministic_algorithms, True, r"are_deterministic_algorithms_enabled\(\)"),
    ],
)
def test_a_setting_by_which_eager_runs_other_ops_is_refused(
    setting: Callable[[Any], None], value: Any, text: str
) -> None:
    it = rewritten("plain")
    before: dict[Any, Any] = {torch.set_default_dtype: torch.float32}
    setting(value)
    try:
        with pytest.raises(RewriteError, match=text):
            it.step()
    finally:
        setting(before.get(setting, not value))
    it.step()


def test_attention_that_is_tried_in_another_order_is_refused() -> None:
    it = rewritten("plain")
    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    every = [*order, SDPBackend.CUDNN_ATTENTION]
    with (
        sdpa_kernel(every, set_priority=True),
        pytest.raises(RewriteError, match=r"the order of torch\.nn\.attention\.sdpa_kernel was"),
    ):
        it.step()
    it.step()


def test_a_global_module_hook_is_refused_before_and_after_capture() -> None:
    it = rewritten("plain")
    handle = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(RewriteError, match="remove the global module hook"):
            it.step()
        model, args, *_ = make("plain")
        with pytest.raises(CaptureError, match="remove the global module hook"):
            capture(model, args)
    finally:
        handle.remove()
    it.step()


def test_a_hook_that_eager_would_not_call_is_refused() -> None:
    it = rewritten("two_heads")
    it.module.second.weight.register_hook(lambda g: g)  # pyright: ignore
    with pytest.raises(RewriteError, match=r"remove the hook on second\.weight"):
        it.outputs()[0].sum().backward()
    it.module.zero_grad()
    it.step()


def test_a_part_of_the_outputs_leaves_other_gradients_unset() -> None:
    it = rewritten("two_heads")
    it.outputs()[1].sum().backward()
    assert it.module.first.weight.grad is None  # pyright: ignore
    assert it.module.second.weight.grad is not None  # pyright: ignore


def test_a_copy_of_a_module_with_tensors_of_its_own_uses_its_own() -> None:
    """A plain tensor attribute that the graph has taken in is that of the copy."""
    _, module = planned("constant_attribute")
    other = copy.deepcopy(module)
    assert isinstance(other, RematModule)
    assert other._remat_guards.constants[0][3] is not module._remat_guards.constants[0][3]
    assert other._remat_compiled_step is not module._remat_compiled_step
