"""Forward that writes into a tensor which is no input of the step: refused, by its name.

Parameters, buffers and arguments are inputs, and each step writes to them as eager does. A plain
tensor of a module, of a global or of a module that is no submodule is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import line_of_user
from remat.graph_capture.python_state.watch import PythonState

_WRITES_NO_VALUES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_"})
_STATISTICS = frozenset({"num_batches_tracked", "running_mean", "running_var"})
_IN_PLACE = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__imatmul__", "__iand__", "__ior__", "__ixor__", "__ilshift__",
    "__irshift__",
})  # fmt: skip


class NoForeignWrites(TorchFunctionMode):
    """While forward is traced, refuse code that writes into a constant of the graph.

    Parameters
    ----------
    state : where the tensors are looked for that code reaches.

    Raises
    ------
    CaptureError : names the tensor and the line, and what works.
    """

    def __init__(self, kind: str, state: PythonState) -> None:
        super().__init__()
        self.kind, self.state = kind, state

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, unless it writes into such a tensor."""
        for tensor in _written_by(func, args, kwargs or {}):
            owner = _owner(tensor)
            if owner is not None and (line := line_of_user()):
                raise self._refused(owner, line)
        return func(*args, **(kwargs or {}))

    def _refused(self, tensor: Tensor, line: str) -> CaptureError:
        name = next(self._names_of(tensor), f"a tensor of shape {list(tensor.shape)}")
        owner, _, of = name.rpartition(".")
        if of in _STATISTICS:
            way = f"call eval() on {owner}, or make it a submodule of the model"
        else:
            way = (
                f"register {name} as a buffer (register_buffer) of the model, or pass it to forward"
            )
        return CaptureError(
            f"{way}: forward of {self.kind} writes into {of if of in _STATISTICS else 'it'}{line}, "
            "which is neither parameter, buffer nor argument of the step, so that a step of a plan "
            "would not write it"
        )

    def _names_of(self, tensor: Tensor) -> Iterator[str]:
        for place in self.state.places:
            value: Any = place.value
            if value is tensor:
                yield place.text
            items = list(value.values()) if isinstance(value, Mapping) else value
            if isinstance(items, (list, tuple)) and any(item is tensor for item in items):
                yield place.text


def _written_by(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """The tensors that a function of torch writes to, as far as its name says so."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _WRITES_NO_VALUES
    targets = [*args[:1]] if is_in_place or name in _IN_PLACE else []
    for leaf in pytree.tree_leaves([*targets, kwargs.get("out")]):
        if isinstance(leaf, Tensor):
            yield leaf


def _owner(tensor: Tensor) -> Tensor | None:
    """The constant that a tensor is, or is a view of; None for what the trace has made."""
    base = tensor._base if isinstance(tensor, FakeTensor) else None
    while base is not None and isinstance(base, FakeTensor):
        base = base._base
    owner = tensor if base is None else base
    return owner if type(owner) in (Tensor, nn.Parameter) else None
