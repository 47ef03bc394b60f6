"""Autocast as CUDA has it, on tensors of the CPU: for a step that is traced for a GPU not here.

Autograd takes no fake CUDA tensors without a driver (torch 2.11 to 2.14). So both devices' autocast
becomes, in one thread, a third kind, which torch has no kernels for; those here cast as CUDA's do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.amp import autocast_mode
from torch.library import Library, fallthrough_kernel

from remat.graph_capture.torch_private.core import has_kernel, pytree

_C: Any = torch._C
_BOTH, _KIND, _KEY = ("cpu", "cuda"), "ipu", "AutocastIPU"
_STATES = "is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"


@contextlib.contextmanager
def autocast_of_cuda() -> Generator[None]:
    """Have autocast of the CPU and of CUDA, around this and inside, cast as CUDA's does."""
    _registered()
    on = next((kind for kind in _BOTH if torch.is_autocast_enabled(kind)), "")
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
        stack.callback(torch.set_autocast_enabled, _KIND, False)
        torch.set_autocast_dtype(_KIND, torch.get_autocast_dtype(on or "cuda"))
        torch.set_autocast_enabled(_KIND, bool(on))
        torch.set_autocast_enabled("cpu", False)
        # CUDA's own is refused without a driver, and casts only tensors that are there.
        places = (torch.autocast, "__init__", 1, "cpu"), (autocast_mode, "_cast", 1, "cpu")
        for owner, name, place, kind in (*((torch, name, 0, _KIND) for name in _STATES), *places):
            before = getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, _of_one_kind(before, place, kind))
        stack.callback(setattr, torch, "get_autocast_gpu_dtype", torch.get_autocast_gpu_dtype)
        torch.get_autocast_gpu_dtype = functools.partial(torch.get_autocast_dtype, "cuda")
        stack.enter_context(_C._IncludeDispatchKeyGuard(getattr(_C.DispatchKey, _KEY)))
        yield


def _of_one_kind(call: Callable[..., Any], place: int, kind: str) -> Callable[..., Any]:
    """`call`, to whose argument at `place` this thread may give any of `_BOTH`, or leave it out."""
    thread = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            named = kwargs.pop("device_type", None)
            rest = args[place:] if named is None else (named, *args[place:])
            if not (rest and isinstance(rest[0], str)):  # old forms mean CUDA
                rest = "cuda", *rest
            args = (*args[:place], kind if rest[0] in _BOTH else rest[0], *rest[1:])
        return call(*args, **kwargs)

    return called


@functools.cache
def _registered() -> tuple[Library, Library]:
    """Kernels for all that this release's CUDA autocast casts; they end with what is returned."""
    table = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes())
    casts = {name: how for how in ("lower", "widest", "dtype", "refused") for name in table[how]}
    others, ops = Library("_", "IMPL"), Library("aten", "IMPL")
    others.fallback(fallthrough_kernel, _KEY)
    for full in _C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space == "aten" and has_kernel(full, "AutocastCUDA"):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            ops.impl(name, functools.partial(_run_cast, casts.get(name, "float32"), op), _KEY)
    return others, ops


def _run_cast(how: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    dtypes = {x.dtype for x in pytree.tree_leaves((args, kwargs)) if _may_cast(x)}
    is_low = how == "lower" or (how == "widest" and torch.float32 not in dtypes)
    dtype = torch.get_autocast_dtype(_KIND) if is_low else torch.float32
    if how == "dtype":  # cast inside of the op, unless the caller names a dtype
        place = [one.name for one in op._schema.arguments].index(how)
        if _may_cast(args[0]) and (*args[place:], kwargs.get(how))[0] is None:
            args, kwargs = args[:place], {**kwargs, how: dtype}
    elif how == "refused":
        op._op_dk(_C.DispatchKey.AutocastCUDA, *args, **kwargs)  # raises torch's own error
    else:
        cast = functools.partial(pytree.tree_map, functools.partial(_cast, dtype))
        in_turn = [cast(arg) for arg in reversed(args)]  # as C++ does
        kwargs, args = cast(kwargs), tuple(reversed(in_turn))
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(getattr(_C.DispatchKey, _KEY))):
        return op(*args, **kwargs)


def _may_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _cast(dtype: torch.dtype, x: Any) -> Any:
    return torch.ops.aten.to.dtype(x, dtype) if _may_cast(x) and x.dtype != dtype else x
