"""Models that cannot be captured exactly are refused, before the trace or with its error.

Shards of FSDP2's, backward hooks of submodules and the like are seen on the module itself. What
fails while traced gets its place and a way out by `refusal`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from remat.graph_capture.devices.device_table import CPU, is_cuda, is_in_table
from remat.graph_capture.devices.placement import check_placement
from remat.graph_capture.errors import CaptureError, DeviceError, option
from remat.graph_capture.joint.provenance import source_of_error
from remat.graph_capture.joint.refuse_ops import cudnn_rnn_message, fused_lstm_message
from remat.graph_capture.joint.trace_errors import in_words, refuse_subclass
from remat.graph_capture.over_ranks.dtensors import is_distributed, is_sharded_by_fsdp
from remat.graph_capture.over_ranks.wrappers import refuse_wrappers
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    ModuleHooks,
    hooked_modules,
    place_of_hooks,
    tells_a_person,
)
from remat.graph_capture.tracing.branches import branch_on_values, is_of_values, known_way_out
from remat.graph_capture.tracing.records import leaves_in

VECTORS_BYTES = {"AVX512": 128}
"""What CPU kernels compute at a time, two vectors, by torch's name for what the CPU can do."""
OTHER_VECTORS_BYTES = 64
"""Of AVX2, and no less of others."""

Hooked = tuple[str, nn.Module, str, Any]
"""Path and module, and the name of a table of its hooks, with the table."""


def hook_tables(modules: Iterable[tuple[str, nn.Module]], tables: Iterable[str]) -> list[Hooked]:
    """The tables of hooks of these modules."""
    return [(path, m, table, getattr(m, table)) for path, m in modules for table in tables]


def refuse_module(model: nn.Module, device: str, loss_fn: Callable[..., Any] | None = None) -> None:
    """Raise `CaptureError` for a module whose training step cannot be captured exactly.

    Parameters
    ----------
    device : that the step is captured for. Ops of one that is not in the table are run.
    """
    refuse_wrappers(model)
    needs_storage = not is_in_table(device)
    for path, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"parameter {path} is not initialised: run the lazy module once on a batch first"
            )
        if is_distributed(parameter) and is_sharded_by_fsdp(model):
            raise CaptureError(distributed_message(path))
        if needs_storage and parameter.is_meta:
            raise CaptureError(
                f"parameter {path} is on the meta device, and the ops are to run here: build the "
                "model with storage, or plan for another device by name, such as "
                f"{option('device', 'h100')}"
            )
        check_placement(f"parameter {path}", parameter.device, device)
    for path, buffer in model.named_buffers():
        refuse_subclass(f"buffer {path}", buffer)
        check_placement(f"buffer {path}", buffer.device, device)
    if unheard := unheard_hook(hook_tables(hooked_modules(model, loss_fn), BACKWARD_HOOKS)):
        raise CaptureError(unheard)
    for path, module in hooked_modules(model, loss_fn):
        _refuse_hooks_that_tell(place_of_hooks(path, module))
    for path, module in model.named_modules():
        _refuse_kind(path or "the model", module, device)
    if not model.training:
        raise CaptureError(
            f"{type(model).__name__} is in eval mode, and a plan is for training: "
            "call model.train() first"
        )


def is_all_frozen(model: nn.Module, batch: Any) -> bool:
    """Whether neither a parameter nor an input requires grad, so that a step has no backward."""
    tensors = itertools.chain(model.parameters(), filter(torch.is_tensor, leaves_in(batch)))
    return not any(tensor.requires_grad for tensor in tensors)


def refuse_all_frozen(model: nn.Module, batch: Any = ()) -> None:
    """Refuse a step that has no backward."""
    if is_all_frozen(model, batch):
        raise CaptureError(
            f"no parameter of {type(model).__name__} requires grad, so there is no backward "
            "to plan. Unfreeze what is to be trained first, or give inputs that require grad"
        )


def _refuse_hooks_that_tell(place: ModuleHooks) -> None:
    """Refuse a hook that prints or logs: the trace would run it, and no step would."""
    for hook in place.value:
        if name := tells_a_person(hook.function):
            raise CaptureError(
                f"the {place.text} ({hook}) calls {name}, and the rewritten step runs ops, not "
                "submodules, so it would say nothing. Remove it (handle.remove()), or register it "
                "on the whole model"
            )


def _refuse_kind(path: str, module: nn.Module, device: str) -> None:
    """Refuse a module whose class rules out an exact graph."""
    if module._compiled_call_impl is not None:
        raise CaptureError(
            f"{path} was compiled in place by .compile(), and such code cannot be traced: leave "
            "that out, or undo it by ._compiled_call_impl = None on it. For code by Inductor give "
            'compile=True, or plan with torch.compile(model, backend="remat")'
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{path} is compiled by torch.jit, and its ops cannot be traced: use the module that "
            "it was compiled from"
        )
    if is_cuda(device) and isinstance(module, nn.RNNBase) and torch.backends.cudnn.enabled:
        raise CaptureError(cudnn_rnn_message(path))
    if device == CPU and isinstance(module, (nn.GRU, nn.GRUCell)):
        lanes = _elements_at_a_time(module)
        if module.hidden_size % lanes:
            raise CaptureError(
                f"{path} is a {type(module).__name__} of hidden_size {module.hidden_size}. A CPU "
                "computes its gates in place, in rows of that width, and the last bits of a row "
                f"that is no multiple of {lanes} elements cannot be computed apart. Choose "
                f"hidden_size {-(-module.hidden_size // lanes) * lanes}, or write the cell in "
                "tensor ops"
            )


def _elements_at_a_time(module: nn.Module) -> int:
    capability = torch.backends.cpu.get_cpu_capability()
    at_a_time = VECTORS_BYTES.get(capability, OTHER_VECTORS_BYTES)
    return at_a_time // next(module.parameters()).element_size()


def distributed_message(path: str) -> str:
    """The refusal of a parameter that is no longer what was planned, or a shard of FSDP2's."""
    return (
        f"parameter {path} has become a DTensor, or is a shard of FSDP2's, which gathers "
        "parameters by hooks outside of a plan: make the plan first, then call fully_shard on the "
        "rewritten modules, and call them through the sharded root. parallelize_module comes "
        "before the plan"
    )


def unheard_hook(tables: list[Hooked]) -> str:
    """The refusal of a hook that a rewritten step would not call; empty if there is none.

    Parameters
    ----------
    tables : that must be empty.
    """
    if torch_modules._has_any_global_hook() and _foreign_global_hooks():
        return (
            "a global module hook is registered (register_module_forward_hook or its like): the "
            "rewritten step runs ops, not submodules, so it would not be called for them. Remove "
            "it (handle.remove()), or watch ops with a TorchDispatchMode"
        )
    return registered_hook(tables)


def registered_hook(tables: list[Hooked]) -> str:
    """The refusal of the first hook in these tables; empty if there is none."""
    for path, module, table, registered in tables:
        if registered:
            return _hook_message(path, module, table)
    return ""


def _foreign_global_hooks() -> bool:
    """Whether a global hook is not torch's own; those of `FlopCounterMode`, say, only watch."""
    tables = (
        torch_modules._global_forward_pre_hooks,
        torch_modules._global_forward_hooks,
        torch_modules._global_backward_pre_hooks,
        torch_modules._global_backward_hooks,
    )
    hooks = (hook for table in tables for hook in table.values())
    return any(str(getattr(hook, "__module__", "")).partition(".")[0] != "torch" for hook in hooks)


def _hook_message(path: str, module: nn.Module, table: str) -> str:
    """The refusal of a hook on a submodule."""
    kind = table.strip("_").removesuffix("s").replace("_", " ")
    is_traced = table in FORWARD_HOOKS  # by the next capture
    way_out = "capture and solve again" if is_traced else "move its work into forward"
    return (
        f"{kind} on submodule {path} ({type(module).__name__}): the rewritten step runs ops, not "
        f"submodules, so the hook would never be called. Remove it (handle.remove()), {way_out}, "
        "or register it on the whole model"
    )


def refusal(
    error: Exception, model: nn.Module, module: str, read: Sequence[str] = ()
) -> CaptureError:
    """A `CaptureError` for what the trace raised, with its place and a way out.

    Parameters
    ----------
    read : the arguments whose values were looked at, and `RANDOM`, if nothing else had a part in
        them.
    """
    source = source_of_error(error.__traceback__)
    place = f"module {module or '(root)'} of {type(model).__name__}, {source or 'unknown line'}"
    kind = type(error).__name__
    if isinstance(error, DeviceError):
        return CaptureError(f"{error} ({place})")
    if way := known_way_out(error):
        return CaptureError(f"torch looks at the values of a tensor ({place}): {way}")
    if type(error).__module__ == "torch._dynamo.exc":
        return CaptureError(
            f"forward calls a function that torch.compile has wrapped, or torch.cond or its like, "
            f"which dynamo traces by itself ({place}): use the function that was wrapped, "
            "._torchdynamo_orig_callable of it, or torch.where in place of torch.cond; or plan "
            'with torch.compile(model, backend="remat")'
        )
    if is_of_values(error):
        return branch_on_values(place, read, _first_line(error))
    if kind == "NotImplementedError" and "torch._C.Generator" in str(error):
        return CaptureError(
            f"forward draws from a generator of its own ({place}), which torch "
            f"{torch.__version__} cannot trace: draw from torch's default generator, or take "
            "torch 2.13"
        )
    if "mkldnn_rnn" in str(error):
        return CaptureError(fused_lstm_message(place))
    if words := in_words(str(error)):
        said = "" if kind == "AssertionError" or "INTERNAL ASSERT" in str(error) else _said(error)
        return CaptureError(f"{words} ({place}){said}")
    return CaptureError(f"forward or backward failed while traced ({place}): {kind}: {error}")


def _said(error: Exception) -> str:
    return f". torch said: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
