"""What a model holds beyond the graph that is compiled, where a graph break has split it.

Graphs are compiled one after the other, each in the first forward that reaches it. So when the
first is planned, the graphs after it are not known. But their parameters are there all the time,
and their gradients from their backward on, which comes before that of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo import symbolic_convert

from remat.graph_capture.tracing.resident import storage_bytes


@dataclass(frozen=True)
class WholeModel:
    """Bytes of all modules that the compiled function names.

    Attributes
    ----------
    static_bytes : of parameters and buffers. gradient_bytes : of all gradients of parameters.
    is_split : whether a graph break ends the graph, so that others follow.
    """

    static_bytes: int = 0
    gradient_bytes: int = 0
    is_split: bool = False


def whole_model() -> WholeModel:
    """The modules around the graph that dynamo is compiling now."""
    translator: Any = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return WholeModel()
    root = translator.output.root_tx
    modules = list(_modules(root.f_locals.values()))
    modules += _modules(root.f_globals.get(name) for name in root.f_code.co_names)
    parameters = {id(p): p for module in modules for p in module.parameters()}
    buffers = {id(b): b for module in modules for b in module.buffers()}
    reason = translator.output.compile_subgraph_reason
    return WholeModel(
        static_bytes=storage_bytes([*parameters.values(), *buffers.values()], set()),
        gradient_bytes=sum(p.nbytes for p in parameters.values() if p.requires_grad),
        is_split=reason is not None and reason.graph_break,
    )


def _modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    return (value for value in values if isinstance(value, nn.Module))
