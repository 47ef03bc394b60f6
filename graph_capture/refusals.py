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
            f"{effect} {_where(*place_of(node))} acts on more than its results, such as by "
            "raising an error for some values, and a step that is replayed cannot order it. Use a "
            "form without: torch.linalg.cholesky_ex in place of cholesky, inv_ex of inv, "
            "solve_ex of solve"
        )
    if mutates(node):
        raise CaptureError(
            f"{name} {_where(*place_of(node))} writes to its input inside the graph, which cannot "
            "be replayed. Use its out-of-place form"
        )


def refuse_sparse(node: fx.Node, place_of: Callable[[fx.Node], tuple[str, str]]) -> None:
    if any(t.layout != torch.strided for t in tensors_of(node) if t is not None):
        raise CaptureError(
            f"{node.name} {_where(*place_of(node))} makes a sparse tensor, which has no storage "
            "to plan for. Use a dense one, by sparse=False of the embedding"
        )


def _where(module: str, source: str) -> str:
    return f"of module {module or '(root)'} ({source or 'unknown line'})"


def _fused_lstm_message(place: str) -> str:
    return (
        "nn.LSTM on CPU runs as one oneDNN op with a hidden workspace, which cannot be replayed "
        f"({place or 'the whole model'}). Unroll it over time, h, c = nn.LSTMCell(...)(x[t], (h, "
        "c)) for each t, or capture and train under torch.backends.mkldnn.flags(enabled=False)"
    )


def cudnn_rnn_message(place: str) -> str:
    return (
        f"{place or 'a recurrent layer'} runs as one cuDNN op, whose backward writes to a hidden "
        "workspace and whose dropout draws from a hidden state, so it cannot be replayed. Unroll "
        "it over time with nn.LSTMCell or nn.GRUCell, or capture and train under "
        "torch.backends.cudnn.flags(enabled=False)"
    )


_SAID = {  # by a part of what torch says
    ".numpy() is not supported": (
        "forward hands a tensor to NumPy, and a graph holds torch's ops alone. Compute it with "
        "torch; or outside forward, and pass what comes of it"
    ),
    "passed to FunctionalTensor.__format__": (
        "forward writes the value of a tensor into a text, and a trace has no values. Do it "
        "outside forward, with a tensor that forward returns"
    ),
    "Cannot access data pointer": (
        "forward asks where a tensor lies in memory, by data_ptr, DLPack or an extension's code, "
        "and a trace has no memory. Make the code an op: torch.library.custom_op, with a "
        "register_fake and a register_autograd"
    ),
    "support the deepcopy protocol": (
        "forward copies a module or a tensor by copy.deepcopy. Make the copy outside forward, and "
        "keep it on the model"
    ),
    "Attempting to use FunctionalTensor on its own": (
        "forward runs ops in another thread, or on a tensor that an earlier call has kept where "
        "nothing sees it, and torch traces neither. Run them one after the other, and keep tensors "
        "on attributes of modules"
    ),
    "Encountered a set_ on a graph input": (
        "forward gives a parameter, a buffer or an argument other data by set_(), and in a step of "
        "a plan it would keep what it has. Write into the tensor instead: tensor.data.copy_(other)"
    ),
    "shape_env must not be None": (
        "forward makes a nested tensor, whose sizes are data, and a plan holds for one size. Pad "
        "to one length, and mask"
    ),
    "mutating a non-functional tensor": (
        "forward writes into a tensor that is neither a parameter, a buffer nor an argument. "
        "Register it as a buffer of the model, or pass it to forward; if a batch norm in training "
        "mode does so, make its module a submodule, or call eval() on it"
    ),
    "expected to have an entirely functional graph": (
        "forward writes into a tensor that is neither a parameter, a buffer nor an argument. "
        "Register it as a buffer of the model (register_buffer), or pass it to forward"
    ),
    "Unexpected fake buffer": (
        "forward keeps a tensor of one call for the next one where nothing sees it. Keep it on an "
        "attribute of a module, or call the model once on a batch, then plan"
    ),
}


def _in_words(said: str) -> str:
    # The page of refusals is made of what functions return.
    return next((words for part, words in _SAID.items() if part in said), "")


def refuse_subclass(what: str, tensor: Tensor) -> None:
    if is_distributed(tensor):
        raise CaptureError(
            f"{what} is a DTensor, and only parameters may be: keep and pass its local part "
            "(.to_local()), and return that (use_local_output=True of the parallel style)"
        )
    if type(tensor) is not Tensor and not isinstance(tensor, (nn.Parameter, FakeTensor)):
        raise CaptureError(
            f"{what} is a {type(tensor).__name__}, a subclass of torch.Tensor that cannot be "
            "traced: use .as_subclass(torch.Tensor) of it, if its values are all that counts"
        )


_DATA_DEPENDENT = (
    "DataDependentOutputException",
    "GuardOnDataDependentSymNode",
    "DynamicOutputShapeException",
    "UnsupportedOperatorException",
)

_WAYS_OUT = {  # by the function of torch that looks at values: how to keep it from doing so
    "_detect_is_causal_mask": "pass is_causal=True beside a causal mask, or is_causal=False",
    "_canonical_mask": "pass masks as floating point numbers, or as bool",
    "__init__ of Distribution": "make the distribution with validate_args=False",
}

_OF_A_MASK = (
    "a mask decides how many rows x[mask], nonzero and torch.where(mask) give: keep all rows, and "
    "use torch.where(mask, x, 0) or x * mask, or take a fixed number of them by topk"
)
_OF_UNIQUE = (
    "the values decide how many of them unique gives: call it outside forward, and pass what comes "
    "of it"
)
_OF_A_LOSS = (
    "the work of ctc_loss depends on the lengths of its targets: plan the model without it, that "
    "is, return its log-probabilities, give no loss_fn, and call ctc_loss on them in your loop"
)
_INSTEAD = {  # by the op whose result's shape or value is asked for: what to write in its place
    "aten._ctc_loss": _OF_A_LOSS,
    "aten.nonzero": _OF_A_MASK,
    "aten.masked_select": _OF_A_MASK,
    "aten._unique2": _OF_UNIQUE,
    "aten.unique_consecutive": _OF_UNIQUE,
    "aten.unique_dim": _OF_UNIQUE,
    "aten.repeat_interleave": (
        "a tensor decides how many rows repeat_interleave makes: give output_size, a Python number"
    ),
    "aten.bincount": (
        "the greatest value decides how many bins bincount makes: use "
        "torch.zeros(n).scatter_add_(0, index, weights), or one_hot(index, n).sum(0)"
    ),
    "aten._pack_padded_sequence": (
        "packed sequences have the sizes that lengths say: give the layer the padded batch, and "
        "mask what it returns"
    ),
    "aten._local_scalar_dense": (
        "a number is read from a tensor, by `if`, .item(), int(), float(), one_hot without "
        "num_classes or as a size: use torch.where in place of a branch; or pass the number to "
        "forward as a Python number, of which remat.rematerialize without a batch makes a plan each"
    ),
}

_ANY = "replace the `if`, `.item()` or index by tensor ops such as torch.where or masking"


def _branch_on_values(place: str, read: Sequence[str], said: str) -> CaptureError:
    """`read`: arguments whose values were looked at, and `RANDOM`, if nothing else had a part.
    `said`: the first line of what torch says."""
    what, ways = "", list[str]()
    if named := " and ".join(name for name in read if name != RANDOM):
        what = f", the values of {named},"
        ways.append(f"leave {named} out, if the model can do without it.")
    elif read:
        what = f", {RANDOM},"
        ways.append(
            "set the option that has it drawn (layerdrop, stochastic depth) to 0, if nothing is "
            "drawn then, or draw it outside forward and pass a Python number, of which "
            "remat.rematerialize without a batch makes a plan each."
        )
    # Torch's line ends in the name of the op that looks, with its overload.
    instead = _INSTEAD.get(said.rpartition(".")[0].split(" ")[-1], _ANY)
    ways.append(
        f"{instead}; or plan the parts before and after it separately, each by "
        'remat.rematerialize. Or plan with torch.compile(model, backend="remat"), which breaks '
        "the graph there."
    )
    text = " Or: ".join(ways)
    return CaptureError(
        f"control flow or a shape depends on tensor data{what} ({place}): one static graph cannot "
        f"hold both branches. {text[0].upper()}{text[1:]} torch said: {said}"
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
    tensors = itertools.chain(model.parameters(), filter(torch.is_tensor, leaves_in(batch)))
    return not any(tensor.requires_grad for tensor in tensors)


def refuse_all_frozen(model: nn.Module, batch: Any = ()) -> None:
    if is_all_frozen(model, batch):
        raise CaptureError(
            f"no parameter of {type(model).__name__} requires grad, so there is no backward "
            "to plan. Unfreeze what is to be trained first, or give inputs that require grad"
        )


def _refuse_hooks_that_tell(place: ModuleHooks) -> None:
    for hook in place.value:  # the trace would run it, and no step would
        if name := tells_a_person(hook.function):
            raise CaptureError(
                f"the {place.text} ({hook}) calls {name}, and the rewritten step runs ops, not "
                "submodules, so it would say nothing. Remove it (handle.remove()), or register it "
                "on the whole model"
            )


def _refuse_kind(path: str, module: nn.Module, device: str) -> None:
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
        capability = torch.backends.cpu.get_cpu_capability()
        at_a_time = _VECTORS_BYTES.get(capability, _OTHER_VECTORS_BYTES)
        lanes = at_a_time // next(module.parameters()).element_size()
        if module.hidden_size % lanes:
            raise CaptureError(
                f"{path} is a {type(module).__name__} of hidden_size {module.hidden_size}. A CPU "
                "computes its gates in place, in rows of that width, and the last bits of a row "
                f"that is no multiple of {lanes} elements cannot be computed apart. Choose "
                f"hidden_size {-(-module.hidden_size // lanes) * lanes}, or write the cell in "
                "tensor ops"
            )


def distributed_message(path: str) -> str:
    return (
        f"parameter {path} has become a DTensor, or is a shard of FSDP2's, which gathers "
        "parameters by hooks outside of a plan: make the plan first, then call fully_shard on the "
        "rewritten modules, and call them through the sharded root. parallelize_module comes "
        "before the plan"
    )


def unheard_hook(tables: list[Hooked]) -> str:
    """The refusal of a hook that a rewritten step would not call; empty if there is none."""
    # Torch's own, as those of `FlopCounterMode`, only watch.
    homes = (str(getattr(hook, "__module__", "")).partition(".")[0] for hook in global_hooks())
    if has_global_hook() and any(home != "torch" for home in homes):
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


def _hook_message(path: str, module: nn.Module, table: str) -> str:
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
    """What the trace raised, with its place and a way out; `read`: as of `_branch_on_values`."""
    source = source_of_error(error.__traceback__)
    place = f"module {module or '(root)'} of {type(model).__name__}, {source or 'unknown line'}"
    kind = type(error).__name__
    if isinstance(error, DeviceError):
        return DeviceError(f"{error} ({place})")
    if way := _known_way_out(error):  # first: torch's own function has a switch
        return CaptureError(f"torch looks at the values of a tensor ({place}): {way}")
    if type(error).__module__ == "torch._dynamo.exc":
        return CaptureError(
            f"forward calls a function that torch.compile has wrapped, or torch.cond or its like, "
            f"which dynamo traces by itself ({place}): use the function that was wrapped, "
            "._torchdynamo_orig_callable of it, or torch.where in place of torch.cond; or plan "
            'with torch.compile(model, backend="remat")'
        )
    # Some of torch's errors say so in their text alone.
    if kind in _DATA_DEPENDENT or "data-dependent" in str(error).lower():
        return _branch_on_values(place, read, _first_line(error))
    if kind == "NotImplementedError" and "torch._C.Generator" in str(error):
        return CaptureError(
            f"forward draws from a generator of its own ({place}), which torch "
            f"{torch.__version__} cannot trace: draw from torch's default generator, or take "
            "torch 2.13"
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
