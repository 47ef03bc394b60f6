"""What updates during backward take: of an optimizer that is here, and of one by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from remat.graph_capture.errors import CaptureError, option

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from remat.graph_capture.graph import Optimizer as OptimizerName
    from remat.graph_capture.joint.gradients import GradientRelease
    from remat.graph_capture.tracing.traced_step import Trace
    from remat.rewriter.graphs.updating import Updates
    from remat.step_spec import StepSpec


def _refuse_scaling() -> None:
    import torch

    from remat.graph_capture.tracing.recipe import autocast_state

    # Autocast to float16 is trained with a GradScaler.
    if any(on and dtype is torch.float16 for _, on, dtype in autocast_state()):
        raise CaptureError(
            "use bfloat16, or update after backward (remat.rematerialize): float16 autocast needs "
            "a GradScaler, which unscales gradients after backward, so updates during backward "
            "would take scaled ones"
        )


def _refuse_parts(model: nn.Module) -> None:
    from remat.graph_capture.distributed.dtensors import has_dtensors

    if has_dtensors(model):  # a rank has a gradient of the whole and one of its part
        raise CaptureError(
            f"update after backward (remat.rematerialize): {type(model).__name__} has parameters "
            "that are DTensors, which cannot be updated during backward"
        )


def require_own_storages(state: Mapping[str, Tensor]) -> None:
    # Empty tensors all have the address 0.
    names = {name: t.untyped_storage().data_ptr() for name, t in state.items() if t.numel()}
    shared = {address for address, number in Counter(names.values()).items() if number > 1}
    if both := [name for name, address in names.items() if address in shared]:
        raise CaptureError(
            f"give {both[0]} and {both[1]} storage of their own, or update after backward: they "
            "are views of one tensor, so an update of one changes the other"
        )


def require_no_other_reader(traced: Trace, optimizer: Optimizer) -> None:
    from remat.rewriter.guards.forward import constants_of

    # The graph does not know of a later read by another tensor, which would find new values.
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    updated = {one.untyped_storage().data_ptr() for one in parameters}
    for constant in constants_of(traced.joint.module):
        if constant.numel() and constant.untyped_storage().data_ptr() in updated:
            raise CaptureError(
                "read the parameter itself, or update after backward: forward reads it through "
                f"another tensor of shape {list(constant.shape)}, such as its .data"
            )


def _optimizer_in_backward_of(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable[..., Any] | None, accumulate: bool
) -> GradientRelease:
    """What the updates take, of the parameters that both the step and the optimizer have."""
    from remat.graph_capture.devices.known_devices import allocator_rounding
    from remat.graph_capture.devices.placement import meter_of, resolved_device
    from remat.graph_capture.joint.gradients import GradientRelease, UpdateCosts, require_known
    from remat.graph_capture.tracing.step_module import with_loss

    require_known(optimizer)
    device, first = resolved_device(None, model), dict[int, str]()
    by_path = _parameters(model, loss_fn)
    for path, one in by_path.items():
        first.setdefault(id(one), path)
    parameters = {path: by_path[path] for path in first.values()}
    _refuse_parts(model)
    require_own_storages({**parameters, **dict(with_loss(model, loss_fn).named_buffers())})
    costs = UpdateCosts(optimizer, parameters, meter_of(device), allocator_rounding(device))
    if not costs.of:
        raise CaptureError(
            "make the optimizer of model.parameters(): it has no parameter of this "
            f"{type(model).__name__}"
        )
    # A trace may know a module that stands at two paths by the second.
    known = {path: first[id(one)] for path, one in by_path.items() if first[id(one)] in costs.of}

    def as_measured(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known[path] for path in paths)

    return GradientRelease(
        is_added=accumulate, updates=tuple(known),
        together=lambda paths: costs.together(as_measured(paths)),
        together_us=lambda paths: costs.together_us(as_measured(paths)),
        state_bytes=costs.state_bytes(),
    )  # fmt: skip


# Times a parameter's bytes that its update reads and writes: gradient, parameter and moments.
_MOVED: dict[OptimizerName, int] = {"sgd": 3, "momentum": 5, "adamw": 7, "adamw-fused": 7}


def planned_optimizer_in_backward(
    model: nn.Module, optimizer: OptimizerName, device: str, *,
    loss_fn: Callable[..., Any] | None = None, accumulate: bool = False,
) -> GradientRelease:  # fmt: skip
    from remat.graph_capture.devices.known_devices import is_in_table, modelled_device
    from remat.graph_capture.joint.gradients import GradientRelease

    if optimizer == "none":
        raise CaptureError(
            f"name the optimizer for updates during backward: {option('optimizer', 'sgd')}, "
            "momentum or adamw"
        )
    if is_in_table(device):
        names = _parameters(model, loss_fn)  # a fused optimizer takes no memory meanwhile
        sizes = {name: one.nbytes for name, one in names.items() if one.requires_grad}
        bytes_per_us = modelled_device(device).bytes_per_us / _MOVED[optimizer]

        def together_us(names: tuple[str, ...]) -> float:
            return sum(sizes[name] for name in names) / bytes_per_us

        updates = tuple(sizes)
        return GradientRelease(is_added=accumulate, updates=updates, together_us=together_us)
    from torch.optim import SGD, AdamW

    momentum = 0.9 if optimizer == "momentum" else 0.0  # the value takes no memory
    parameters = model.parameters()
    made = AdamW(parameters) if "adamw" in optimizer else SGD(parameters, momentum=momentum)
    return _optimizer_in_backward_of(model, made, loss_fn, accumulate)


def _parameters(model: nn.Module, loss_fn: Callable[..., Any] | None) -> dict[str, nn.Parameter]:
    """The parameters of the step by the paths that users know, each by all of its paths."""
    from remat.graph_capture.joint.provenance import path_in_model
    from remat.graph_capture.tracing.step_module import with_loss

    step = with_loss(model, loss_fn)
    named = step.named_parameters(remove_duplicate=False)
    return {name if step is model else path_in_model(name): one for name, one in named}


def require_updates_in_backward(spec: StepSpec) -> None:
    """Refuse what needs all gradients, before anything is traced."""
    if spec.options.get("max_grad_norm") is not None:
        raise CaptureError(
            "leave out clipping, or update after backward (remat.rematerialize): the global norm "
            "of gradients is only known when the last one is there, and updates during backward "
            "have used the others by then"
        )
    _refuse_scaling()


def release_of(spec: StepSpec) -> GradientRelease | None:
    """What the updates of a step take; None where it has none."""
    if (optimizer := spec.optimizer_in_backward) is None:
        return None
    require_updates_in_backward(spec)
    return _optimizer_in_backward_of(spec.model, optimizer, spec.loss_fn, spec.accumulate)


def updates_of(spec: StepSpec, traced: Trace) -> Updates | None:
    """The updates of a step that was traced; None where it has none."""
    if (optimizer := spec.optimizer_in_backward) is None:
        return None
    from remat.ranks.same_order import ONE_RANK, require_group
    from remat.rewriter.graphs.updating import Updates

    require_no_other_reader(traced, optimizer)
    require_group(traced.joint.module, None, ONE_RANK.format(what="an update in backward"))
    return Updates(optimizer, type(spec.model).__name__, accumulates=spec.accumulate)
