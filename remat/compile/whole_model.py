"""What a model holds beyond the graph that is compiled, where it is compiled in parts.

A graph break splits it, or the user compiles its blocks by themselves. The modules that call a
block are on the stack while it is compiled.

Graphs are compiled one after the other, each in the first forward that reaches it. So when the
first is planned, the graphs after it are not known. But their parameters are there all the time,
and their gradients from their backward on, which comes before that of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._dynamo import symbolic_convert

from remat.graph_capture.tracing.resident import storage_bytes

BUFFERS = 3
"""How many buffers of the size of a block FSDP2 needs beside the block that runs."""
_CALL: Any = nn.Module._call_impl.__code__
"""The code that calls the forward of every module."""


@dataclass(frozen=True)
class WholeModel:
    """Bytes of all modules that the compiled function names.

    Attributes
    ----------
    static_bytes : of parameters and buffers. gradient_bytes : of all gradients of parameters.
    is_split : whether other graphs follow: a graph break ends this one, or it is of a module that
        is part of another. n_alike : how many compiled modules of the same class there are.
    around : class of the module that it is part of; empty if it is none.
    """

    static_bytes: int = 0
    gradient_bytes: int = 0
    is_split: bool = False
    n_alike: int = 1
    around: str = ""


def whole_model() -> WholeModel:
    """The modules around the graph that dynamo is compiling now."""
    translator: Any = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return WholeModel()
    root = translator.output.root_tx
    modules = list(_modules(root.f_locals.values()))
    modules += _modules(root.f_globals.get(name) for name in root.f_code.co_names)
    outer = _outermost(modules)
    static_bytes, gradient_bytes = _bytes_held_by(modules)
    outer_bytes, outer_gradient_bytes = (0, 0) if outer is None else _bytes_held_by([outer])
    outer_bytes += 0 if outer is None else sharding_buffers_bytes(outer)
    reason = translator.output.compile_subgraph_reason
    is_part = outer_bytes > static_bytes
    return WholeModel(
        static_bytes=max(static_bytes, outer_bytes),
        gradient_bytes=max(gradient_bytes, outer_gradient_bytes),
        is_split=is_part or (reason is not None and reason.graph_break),
        n_alike=_n_alike(modules[0], outer) if is_part else 1,
        around=type(getattr(outer, "_orig_mod", outer)).__name__ if is_part else "",
    )


def _modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    return (value for value in values if isinstance(value, nn.Module))


def _outermost(parts: Sequence[nn.Module]) -> nn.Module | None:
    """The outermost module whose forward is calling these modules; None if there is none."""
    found: nn.Module | None = None
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code is _CALL else None
        if isinstance(owner, nn.Module) and not _inside(owner).isdisjoint(map(id, parts)):
            found = owner
        frame = frame.f_back
    return found


def _inside(module: nn.Module) -> set[int]:
    return set(map(id, module.modules()))


def _bytes_held_by(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Bytes of parameters and buffers, and of gradients; of a sharded one, this rank's part."""
    parameters = {id(p): p for module in modules for p in module.parameters()}
    buffers = {id(b): b for module in modules for b in module.buffers()}
    here = [getattr(t, "_local_tensor", t) for t in (*parameters.values(), *buffers.values())]
    trained = [p for p in parameters.values() if p.requires_grad]
    gradient_bytes = sum(getattr(p, "_local_tensor", p).nbytes for p in trained)
    return storage_bytes(here, set()), gradient_bytes


def sharding_buffers_bytes(outer: nn.Module) -> int:
    """What FSDP2 holds beside a block that runs; 0 where nothing is sharded.

    These are the parameters that it gathers ahead, the buffer that it reduces gradients in, and on
    a CPU the copy that gloo makes: each at most as large as the largest block.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in outer.modules() if isinstance(module, FSDPModule)]
    return BUFFERS * max(map(_sharded_bytes, sharded), default=0)


def _sharded_bytes(module: nn.Module) -> int:
    """Bytes of all parameters that are sharded with a module, and not with one inside, as whole."""
    from torch.distributed.fsdp import FSDPModule

    inner = [m for m in module.modules() if m is not module and isinstance(m, FSDPModule)]
    others = {id(p) for m in inner for p in m.parameters()}
    own = [p for p in module.parameters() if id(p) not in others]
    # `numel` of a sharded parameter is that of the whole.
    return sum(p.numel() * p.element_size() for p in own)


def _n_alike(part: nn.Module, outer: nn.Module | None) -> int:
    """How many compiled modules in `outer` run the same code as `part`."""
    if outer is None:
        return 1
    compiled = {
        id(inner): inner
        for module in outer.modules()
        for inner in (getattr(module, "_orig_mod", module),)
        if inner is not module or module._compiled_call_impl is not None
    }
    return max(1, sum(type(module) is type(part) for module in compiled.values()))
