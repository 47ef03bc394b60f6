"""Frames that dynamo gives up: no backend sees them, so nothing in them could be planned.

At a graph break in a loop, an `nn.LSTM`, or its limit of compilations, dynamo runs the frame
eagerly in silence. It would train outside of every plan, so it is refused before it runs. The
user's own modules are no reason: dynamo tries each by itself.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.formats import bytes_text
from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.torch_private.aot import (
    ContinueExecutionCache,
    ConvertFrameAssert,
    Unsupported,
    UserError,
)
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.resident import storage_bytes
from remat.rewriter.guards.backward import COMPILED_NODE

_SHOWN = 3  # layers that an error names
_REMEDY = {  # what to do, by a part of what dynamo says; the last where it says something else
    "recompile limit": (
        "Pad batches to fewer sizes, leave out dynamic=False, or raise "
        "torch._dynamo.config.recompile_limit"
    ),
    "RNN, GRU, or LSTM": (
        "Set torch._dynamo.config.allow_rnn = True (not for an LSTM on a CPU), or take "
        "remat.rematerialize(model, ..., budget=...)"
    ),
    "": (
        "Move that out of the loop or of forward, or compile each block with one options object "
        '(block.compile(backend="remat", options=options))'
    ),
}
_warned = set[CodeType]()


def refuse_given_up_frames(backend: Callable[..., Any]) -> None:
    """From now on refuse each frame under `backend` that dynamo gives up, if it would train."""
    convert = ConvertFrameAssert.__call__  # wrapped once a process, as dynamo tells nobody

    @functools.wraps(convert)
    def looked_at(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except (Unsupported, UserError) as error:
            # With fullgraph=True the user gets dynamo's error anyway.
            if not self._one_graph and _is_under(self._torchdynamo_orig_backend, backend):
                _refuse_if_trained(frame, error)
            raise

    ConvertFrameAssert.__call__ = looked_at  # pyright: ignore[reportAttributeAccessIssue]


def refuse_lstm(gm: fx.GraphModule, device: str) -> None:
    # oneDNN's returns no tensor, so Inductor fails; its backward crashes the process.
    if device == CPU and any(node.target is torch.lstm for node in gm.graph.nodes):
        raise CaptureError(
            "use remat.rematerialize(model, ..., budget=...), or a GRU: torch's compilers cannot "
            "run an nn.LSTM on a CPU"
        )


def warn_of_eager_ops(inputs: Iterable[Any]) -> None:
    """Say what ran eagerly between an earlier graph and this one, such as a disabled module."""
    nodes = _eager_nodes(inputs)
    # Leaves, such as parameters, are there anyway.
    if held_bytes := storage_bytes(t for node in nodes for t in _saved(node) if not t.is_leaf):
        names = ", ".join(sorted({node.name() for node in nodes})[:_SHOWN])
        warnings.warn(
            "remove the graph break or torch.compiler.disable, or lower the budget by "
            f"{bytes_text(held_bytes)}: {len(nodes)} ops ran eagerly between two compiled graphs "
            f"({names}, ...) and save that much for backward, which the budget does not count",
            stacklevel=3,
        )


def _eager_nodes(inputs: Iterable[Any]) -> list[Any]:
    """Nodes of autograd between compiled graphs and what they made; none without such a graph."""
    todo = [given.grad_fn for given in inputs if isinstance(given, Tensor)]
    seen, is_after_one = dict[Any, None](), False
    while todo:
        if (node := todo.pop()) is None or node in seen:
            continue
        if node.name() == COMPILED_NODE:
            is_after_one = True  # what lies behind it is another graph's
            continue
        seen[node] = None
        todo += [before for before, _ in node.next_functions]
    return list(seen) if is_after_one else []


def _saved(node: Any) -> Iterator[Tensor]:
    names = (name for name in dir(node) if name.startswith("_saved_"))
    values = pytree.tree_leaves([getattr(node, name) for name in names])
    values += getattr(node, "saved_tensors", ())  # an `autograd.Function` keeps its tensors there
    yield from (value for value in values if isinstance(value, Tensor))


def _is_under(given: Any, backend: Callable[..., Any]) -> bool:
    """Whether what dynamo was given is `backend` under torch's wrappers, DDP's among them."""
    inside = ("_torchdynamo_orig_backend", "compiler_fn", "func", "backend_compile_fn", "__self__")
    while given is not None and given is not backend:
        given = next((getattr(given, name) for name in inside if hasattr(given, name)), None)
    return given is backend


def _refuse_if_trained(frame: Any, error: Exception) -> None:
    """Raise where a frame runs layers with gradients; warn where it has only activations."""
    if not torch.is_grad_enabled():
        return
    code: CodeType = frame.f_code
    named = {**_outer_names(frame), **frame.f_locals}
    trained = [name for key, value in named.items() for name in _run_here(value, key, code)]
    whole = _whole(code)
    where = f"{whole.co_qualname} ({whole.co_filename}:{whole.co_firstlineno})"
    if trained:
        more = f" and {len(trained) - _SHOWN} more" if len(trained) > _SHOWN else ""
        reason = _reason(error)
        raise CaptureError(
            f"{next(text for part, text in _REMEDY.items() if part in reason)}. The budget cannot "
            f"be kept here:\ndynamo gave up at: {reason}. It would run {where} eagerly, and train "
            f"{', '.join(trained[:_SHOWN])}{more} without a plan"
        )
    has_activations = any(isinstance(v, Tensor) and v.requires_grad for v in named.values())
    if code not in _warned and has_activations:
        _warned.add(code)
        warnings.warn(
            f"dynamo runs {where} eagerly, so what its own lines save for backward is not in the "
            f"budget. It gave up at: {_reason(error)}",
            stacklevel=2,
        )


def _outer_names(frame: Any) -> dict[str, Any]:
    """What the code names beyond its locals: globals, and variables of functions around it."""
    code: CodeType = frame.f_code
    read = (one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")
    found = {name: frame.f_globals[name] for name in read if name in frame.f_globals}
    for name, cell in zip(code.co_freevars, frame.closure or (), strict=False):
        with contextlib.suppress(ValueError):  # empty as yet
            found[name] = cell.cell_contents
    return found


def _run_here(value: Any, name: str, code: CodeType) -> Iterator[str]:
    """Names of what `code` itself trains by `value`: parameters, and layers of torch's."""
    if isinstance(value, nn.Module):
        if _is_method(code, value):
            # Its own lines read these parameters; a child that it calls has a frame of its own.
            own = (n for n, p in value.named_parameters(recurse=False) if p.requires_grad)
            yield from (f"{name}.{n}" for n in own)
            for n, child in value.named_children():
                yield from _layers(child, f"{name}.{n}")
        else:
            yield from _layers(value, name)
    elif isinstance(value, (list, tuple)):
        for i, one in enumerate(value):  # pyright: ignore[reportUnknownVariableType]
            yield from _run_here(one, f"{name}[{i}]", code)
    elif isinstance(value, dict):
        for key, one in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _run_here(one, f"{name}[{key!r}]", code)
    elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
        yield name


def _layers(module: nn.Module, name: str) -> Iterator[str]:
    """Layers of torch's own classes, whose frames dynamo skips; not what it tries by itself."""
    # Modules of the user's, and those compiled by themselves, dynamo tries one by one.
    if not type(module).__module__.startswith("torch.nn.") or module._compiled_call_impl:
        return
    children = dict(module.named_children())
    # These have no work of their own: their children may be the user's.
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        for n, child in children.items():
            yield from _layers(child, f"{name}.{n}")
    elif any(parameter.requires_grad for parameter in module.parameters()):
        yield name


def _is_method(code: CodeType, module: nn.Module) -> bool:
    """Whether the code is of a method of this module, or what follows a graph break in one."""
    whole = _whole(code)
    found = (vars(kind).get(whole.co_name) for kind in type(module).__mro__)
    functions = (inspect.unwrap(one) for one in found if callable(one))
    return any(getattr(function, "__code__", None) is whole for function in functions)


def _whole(code: CodeType) -> CodeType:
    """The user's code, where dynamo has made `code` of what follows a graph break in it."""
    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if resumed is None else resumed.code


def _reason(error: Exception) -> str:
    met = error.__cause__ if isinstance(error.__cause__, Unsupported) else error
    stack = getattr(met, "real_stack", None)
    line = f" (line {stack[-1].lineno} of {stack[-1].filename})" if stack else ""
    return str(met).strip().partition("\n")[0] + line
