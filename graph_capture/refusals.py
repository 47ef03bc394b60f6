"""Models that cannot be captured exactly are refused, before the trace or with its error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.devices.known_devices import CPU, is_cuda, is_in_table
from remat.graph_capture.devices.placement import check_placement
from remat.graph_capture.distributed.dtensors import is_distributed, is_sharded_by_fsdp
from remat.graph_capture.distributed.rank_refusals import refuse_wrappers
from remat.graph_capture.errors import CaptureError, DeviceError, option
from remat.graph_capture.joint.constant_folding import RANDOM
from remat.graph_capture.joint.nodes import mutates, target_name, tensors_of
from remat.graph_capture.joint.provenance import source_of_error
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    ModuleHooks,
    hooked_modules,
    place_of_hooks,
    tells_a_person,
)
from remat.graph_capture.torch_private.core import FakeTensor, global_hooks, has_global_hook
from remat.graph_capture.tracing.outputs import leaves_in

_FUSED_LSTM = "aten.mkldnn_rnn_layer"
_CUDNN_RNN = "aten._cudnn_rnn"
_EFFECTS = "with_effects"


def refuse_op(node: fx.Node, place_of: Callable[[fx.Node], tuple[str, str]]) -> None:
    name = target_name(node)
    refuse_sparse(node, place_of)
    if name.startswith(_FUSED_LSTM):
        raise CaptureError(_fused_lstm_message(", ".join(filter(None, place_of(node)))))
    if name.startswith(_CUDNN_RNN):
        raise CaptureError(cudnn_rnn_message(f"{name} {_where(*place_of(node))}"))
    if name.startswith(_EFFECTS):
        effect = next((str(arg) for arg in node.args if not isinstance(arg, fx.Node)), name)
        raise CaptureError(
            "use a form without side effects: torch.linalg.cholesky_ex for cholesky, inv_ex for "
            "inv, solve_ex for solve.\n"
            f"{effect} {_where(*place_of(node))} acts on more than its results, such as by "
            "raising an error for some values, and a replayed step cannot order that"
        )
    if mutates(node):
        raise CaptureError(
            f"use the out-of-place form of {name} {_where(*place_of(node))}: it writes to its "
            "input inside the graph, which cannot be replayed"
        )


def refuse_sparse(node: fx.Node, place_of: Callable[[fx.Node], tuple[str, str]]) -> None:
    if any(t.layout != torch.strided for t in tensors_of(node) if t is not None):
        raise CaptureError(
            f"use a dense gradient (sparse=False of the embedding): {node.name} "
            f"{_where(*place_of(node))} makes a sparse tensor, which has no storage to plan for"
        )


def _where(module: str, source: str) -> str:
    return f"of module {module or '(root)'} ({source or 'unknown line'})"


def _fused_lstm_message(place: str) -> str:
    return (
        "capture and train under torch.backends.mkldnn.flags(enabled=False): nn.LSTM on CPU runs "
        "as one oneDNN op with a hidden workspace, which cannot be replayed "
        f"({place or 'the whole model'}).\n"
        "Or unroll it over time: h, c = nn.LSTMCell(...)(x[t], (h, c)) for each t"
    )


def cudnn_rnn_message(place: str) -> str:
    return (
        "capture and train under torch.backends.cudnn.flags(enabled=False), or unroll the layer "
        "over time with nn.LSTMCell.\n"
        f"{place or 'a recurrent layer'} runs as one cuDNN op, which has a hidden workspace and "
        "draws dropout from a hidden state, so it cannot be replayed"
    )


_SAID = {  # by a part of what torch says
    ".numpy() is not supported": (
        "compute it with torch, or outside forward and pass in the result: forward converts a "
        "tensor to NumPy, and a graph holds only torch's ops"
    ),
    "passed to FunctionalTensor.__format__": (
        "do it outside forward, with a tensor that forward returns: forward writes the value of a "
        "tensor into a text, and a trace has no values"
    ),
    "Cannot access data pointer": (
        "make the code an op: torch.library.custom_op, with register_fake and register_autograd.\n"
        "Forward asks for a tensor's address (data_ptr, DLPack or an extension); a trace has no "
        "memory"
    ),
    "support the deepcopy protocol": (
        "make the copy outside forward, and keep it on the model: forward copies a module or a "
        "tensor with copy.deepcopy"
    ),
    "Attempting to use FunctionalTensor on its own": (
        "run the ops in one thread, and keep tensors on attributes of modules: forward uses "
        "another thread, or a tensor that an earlier call kept elsewhere, and torch traces neither"
    ),
    "Encountered a set_ on a graph input": (
        "write into the tensor instead: tensor.data.copy_(other).\n"
        "Forward gives a parameter, a buffer or an argument other data with set_(), which a "
        "plan's step would not do"
    ),
    "shape_env must not be None": (
        "pad to one length, and mask: forward makes a nested tensor, whose sizes depend on data, "
        "and a plan needs fixed sizes"
    ),
    "mutating a non-functional tensor": (
        "register it as a buffer of the model, or pass it to forward. If it belongs to a batch "
        "norm in training mode, make that a submodule or call eval() on it.\n"
        "Forward writes into a tensor that is neither a parameter, a buffer nor an argument"
    ),
    "expected to have an entirely functional graph": (
        "register it as a buffer of the model (register_buffer), or pass it to forward: forward "
        "writes into a tensor that is neither a parameter, a buffer nor an argument"
    ),
    "Unexpected fake buffer": (
        "keep it on an attribute of a module, or call the model once on a batch before you plan: "
        "forward keeps a tensor from one call to the next in a place that a trace does not see"
    ),
}


def _in_words(said: str) -> str:
    # The page of refusals is made of what functions return.
    return next((words for part, words in _SAID.items() if part in said), "")


def refuse_subclass(what: str, tensor: Tensor) -> None:
    if is_distributed(tensor):
        raise CaptureError(
            "use its local part, .to_local() (use_local_output=True of the parallel style): "
            f"{what} is a DTensor, and only parameters may be DTensors"
        )
    if type(tensor) is not Tensor and not isinstance(tensor, (nn.Parameter, FakeTensor)):
        raise CaptureError(
            f"pass .as_subclass(torch.Tensor) of it, if only its values count: {what} is a "
            f"{type(tensor).__name__}, a subclass of torch.Tensor that cannot be traced"
        )


_DATA_DEPENDENT = (
    "DataDependentOutputException",
    "GuardOnDataDependentSymNode",
    "DynamicOutputShapeException",
    "UnsupportedOperatorException",
)

_WAYS_OUT = {  # by the function of torch that looks at values: how to keep it from doing so
    "_detect_is_causal_mask": "pass is_causal=True beside a causal mask, or is_causal=False",
    "_canonical_mask": "pass masks as floats or as bool",
    "__init__ of Distribution": "make the distribution with validate_args=False",
}

_OF_A_MASK = (
    "keep all rows with torch.where(mask, x, 0) or x * mask, or take a fixed number with topk: a "
    "mask decides how many rows x[mask], nonzero and torch.where(mask) return"
)
_OF_UNIQUE = (
    "call unique outside forward, and pass in the result: the values decide how many it returns"
)
_OF_A_LOSS = (
    "plan the model without ctc_loss: return its log-probabilities, leave out loss_fn, and call "
    "ctc_loss in your loop. Its work depends on the lengths of the targets"
)
_INSTEAD = {  # by the op whose result's shape or value is asked for: what to write in its place
    "aten._ctc_loss": _OF_A_LOSS,
    "aten.nonzero": _OF_A_MASK,
    "aten.masked_select": _OF_A_MASK,
    "aten._unique2": _OF_UNIQUE,
    "aten.unique_consecutive": _OF_UNIQUE,
    "aten.unique_dim": _OF_UNIQUE,
    "aten.repeat_interleave": (
        "pass output_size, a Python number: a tensor decides how many rows repeat_interleave makes"
    ),
    "aten.bincount": (
        "use torch.zeros(n).scatter_add_(0, index, weights), or one_hot(index, n).sum(0): the "
        "greatest value decides how many bins bincount makes"
    ),
    "aten._pack_padded_sequence": (
        "give the layer the padded batch, and mask what it returns: packed sizes depend on lengths"
    ),
    "aten._local_scalar_dense": (
        "use torch.where in place of a branch, or pass forward a Python number "
        "(remat.rematerialize without a batch plans for each value): a number is read from a "
        "tensor, by `if`, .item(), int(), float(), one_hot without num_classes, or as a size"
    ),
}

_ANY = "replace the `if`, `.item()` or index by tensor ops, such as torch.where or a mask"

BY_REMATERIALIZE = "with remat.rematerialize, or "  # no advice to who comes from there


def _branch_on_values(place: str, read: Sequence[str], said: str) -> CaptureError:
    """`read`: arguments whose values were looked at, and `RANDOM`, if nothing else had a part.
    `said`: the first line of what torch says."""
    what, ways = "", list[str]()
    if named := " and ".join(name for name in read if name != RANDOM):
        what = f", the values of {named},"
        ways.append(f"leave {named} out, if the model can do without it")
    elif read:
        what = f", {RANDOM},"
        ways.append(
            "set the option that has it drawn (layerdrop, stochastic depth) to 0, if nothing is "
            "drawn then, or draw it outside forward and pass a Python number (remat.rematerialize "
            "without a batch makes a plan for each value)"
        )
    # Torch's line ends in the name of the op that looks, with its overload.
    ways.append(_INSTEAD.get(said.rpartition(".")[0].split(" ")[-1], _ANY))
    return CaptureError(
        f"{'. Or '.join(ways)}.\n"
        f'Or plan it in parts, {BY_REMATERIALIZE}with torch.compile(model, backend="remat"), which '
        "breaks the graph there.\n"
        f"Control flow or a shape depends on tensor data{what} ({place}): one static graph cannot "
        f"hold both branches. torch said: {said}"
    )


def _known_way_out(error: Exception) -> str:
    """Where a function of torch looks at values; empty if no way out is known."""
    frames = [] if error.__traceback__ is None else list(walk_tb(error.__traceback__))
    for frame, _ in reversed(frames):
        name = frame.f_code.co_name
        # By its file, as many functions have the name.
        if frame.f_code.co_filename.endswith("distributions/distribution.py"):
            name = "__init__ of Distribution"
        if name in _WAYS_OUT:
            return _WAYS_OUT[name]
    return ""


_VECTORS_BYTES = {"AVX512": 128}  # two vectors, what kernels compute at a time
_OTHER_VECTORS_BYTES = 64  # of AVX2, and no less of others

Hooked = tuple[str, nn.Module, str, Any]  # path and module, the name of a table of hooks, the table


def hook_tables(modules: Iterable[tuple[str, nn.Module]], tables: Iterable[str]) -> list[Hooked]:
    return [(path, m, table, getattr(m, table)) for path, m in modules for table in tables]


def refuse_module(model: nn.Module, device: str, loss_fn: Callable[..., Any] | None = None) -> None:
    refuse_wrappers(model)
    needs_storage = not is_in_table(device)  # as its ops are run here
    for path, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise CaptureError(
                f"run the lazy module once on a batch first: parameter {path} is not initialised"
            )
        if is_distributed(parameter) and is_sharded_by_fsdp(model):
            raise CaptureError(distributed_message(path))
        if needs_storage and parameter.is_meta:
            raise CaptureError(
                f"build the model with storage: parameter {path} is on the meta device, and ops "
                "are to run here.\n"
                f"Or plan for another device by name, such as {option('device', 'h100')}"
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
            f"call model.train() first: {type(model).__name__} is in eval mode, and a plan is for "
            "training"
        )


def is_all_frozen(model: nn.Module, batch: Any) -> bool:
    tensors = itertools.chain(model.parameters(), filter(torch.is_tensor, leaves_in(batch)))
    return not any(tensor.requires_grad for tensor in tensors)


def refuse_all_frozen(model: nn.Module, batch: Any = ()) -> None:
    if is_all_frozen(model, batch):
        raise CaptureError(
            "unfreeze the parameters to train, or pass inputs that require grad: no parameter of "
            f"{type(model).__name__} requires grad, so there is no backward to plan"
        )


def _refuse_hooks_that_tell(place: ModuleHooks) -> None:
    for hook in place.value:  # the trace would run it, and no step would
        if name := tells_a_person(hook.function):
            raise CaptureError(
                f"remove the {place.text} ({hook}) with handle.remove(), or register it on the "
                f"whole model: it calls {name}, and the rewritten step runs ops, not submodules, "
                "so it would say nothing"
            )


def _refuse_kind(path: str, module: nn.Module, device: str) -> None:
    if module._compiled_call_impl is not None:
        raise CaptureError(
            f"leave out .compile() on {path}, or undo it with ._compiled_call_impl = None: "
            "compiled code cannot be traced.\n"
            "For Inductor's code pass compile=True, or plan with torch.compile(model, "
            'backend="remat")'
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"use the module from before torch.jit: {path} is compiled by torch.jit, and its ops "
            "cannot be traced"
        )
    if is_cuda(device) and isinstance(module, nn.RNNBase) and torch.backends.cudnn.enabled:
        raise CaptureError(cudnn_rnn_message(path))
    if device == CPU and isinstance(module, (nn.GRU, nn.GRUCell)):
        capability = torch.backends.cpu.get_cpu_capability()
        at_a_time = _VECTORS_BYTES.get(capability, _OTHER_VECTORS_BYTES)
        lanes = at_a_time // next(module.parameters()).element_size()
        if module.hidden_size % lanes:
            raise CaptureError(
                f"choose hidden_size {-(-module.hidden_size // lanes) * lanes}, or write the cell "
                f"in tensor ops: {path} is a {type(module).__name__} of hidden_size "
                f"{module.hidden_size}.\n"
                "A CPU computes its gates in place, and the last bits of a row that is no "
                f"multiple of {lanes} elements cannot be computed separately"
            )


def distributed_message(path: str) -> str:
    return (
        "make the plan first, then call fully_shard on the root alone, or with blocks= on the "
        "rewritten blocks too, and train through "
        f"the sharded root: parameter {path} is a DTensor, or sharded by FSDP2, whose hooks a "
        "plan does not run.\n"
        "parallelize_module comes before the plan"
    )


def unheard_hook(tables: list[Hooked]) -> str:
    """The refusal of a hook that a rewritten step would not call; empty if there is none."""
    # Torch's own, as those of `FlopCounterMode`, only watch.
    homes = (str(getattr(hook, "__module__", "")).partition(".")[0] for hook in global_hooks())
    if has_global_hook() and any(home != "torch" for home in homes):
        return (
            "remove the global module hook (handle.remove()), or watch ops with a "
            "TorchDispatchMode: the rewritten step runs ops, not submodules, so "
            "register_module_forward_hook and its like would not be called for them"
        )
    return registered_hook(tables)


def registered_hook(tables: list[Hooked]) -> str:
    """The refusal of the first hook in these tables; empty if there is none."""
    for path, module, table, registered in tables:
        if any(_is_of_fsdp(hook) for hook in registered.values()):
            return (
                f"plan with blocks=, or call fully_shard on the root alone: submodule {path} is "
                "sharded by itself, and a plan of the whole model runs ops, not submodules"
            )
        if registered:
            return _hook_message(path, module, table)
    return ""


def _is_of_fsdp(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _hook_message(path: str, module: nn.Module, table: str) -> str:
    kind = table.strip("_").removesuffix("s").replace("_", " ")
    is_traced = table in FORWARD_HOOKS  # by the next capture
    way_out = "capture and solve again" if is_traced else "move its work into forward"
    return (
        f"remove the {kind} on submodule {path} ({type(module).__name__}) with handle.remove(), "
        f"{way_out}, or register it on the whole model: the rewritten step runs ops, not "
        "submodules, so the hook would never be called"
    )


def refusal(
    error: Exception, model: nn.Module, module: str, read: Sequence[str] = ()
) -> CaptureError:
    """What the trace raised, with its place and a way out; `read`: as of `_branch_on_values`."""
    source = source_of_error(error.__traceback__)
    place = f"module {module or '(root)'} of {type(model).__name__}, {source or 'unknown line'}"
    kind = type(error).__name__
    if isinstance(error, DeviceError):
        return DeviceError(f"{error} ({place})")
    if way := _known_way_out(error):  # first: torch's own function has a switch
        return CaptureError(f"{way}: torch looks at the values of a tensor ({place})")
    if type(error).__module__ == "torch._dynamo.exc":
        return CaptureError(
            "use the function that was wrapped (its ._torchdynamo_orig_callable), or torch.where "
            "for torch.cond: forward calls a function wrapped by torch.compile, torch.cond or the "
            f"like, which only dynamo traces ({place}).\n"
            'Or plan with torch.compile(model, backend="remat")'
        )
    # Some of torch's errors say so in their text alone.
    if kind in _DATA_DEPENDENT or "data-dependent" in str(error).lower():
        return _branch_on_values(place, read, _first_line(error))
    if kind == "NotImplementedError" and "torch._C.Generator" in str(error):
        return CaptureError(
            "draw from torch's default generator, or use torch 2.13: forward draws from a "
            f"generator of its own ({place}), which torch {torch.__version__} cannot trace"
        )
    if "mkldnn_rnn" in str(error):
        return CaptureError(_fused_lstm_message(place))
    # Torch speaks of stand-ins for tensors, which a user has never made.
    if words := _in_words(str(error)):
        # An assertion of torch's says nothing to a user.
        is_assertion = kind == "AssertionError" or "INTERNAL ASSERT" in str(error)
        said = "" if is_assertion else f". torch said: {_first_line(error)}"
        return CaptureError(f"{words} ({place}){said}")
    return CaptureError(f"forward or backward failed while traced ({place}): {kind}: {error}")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
