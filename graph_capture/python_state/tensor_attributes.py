"""What users set on tensors by name, as in ``x.gain = 2.0``: seen while traced, and compared.

A trace's stand-ins get the attributes. One that is a tensor itself would be one for all steps.
"""

from __future__ import annotations

import dis
import enum
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.provenance import line_of_user
from remat.graph_capture.python_state.executed_code import ExecutedCode
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.reachable_objects import attributes_of
from remat.graph_capture.python_state.state_slots import (
    CONTAINERS,
    MISSING,
    DictItem,
    OpaqueState,
    SlotAttr,
    StateSlot,
    Stream,
    copied,
    is_same,
)
from remat.graph_capture.torch_private.core import pytree

_Attributes = dict[str, Any]
_Copy = TypeVar("_Copy", bound=Tensor)
_BY_TORCH = ("_dynamo_", "_remat_", "_is_", "elem", "persistent")


class _OfTensor:
    """Stands for a tensor that was set on one of the batch; refuses what forward does with it."""

    def __init__(self, name: str) -> None:
        vars(self)["is_named"] = name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs or {}))
        raise next(one for one in given if isinstance(one, _OfTensor))._refused()

    def __getattr__(self, *_: Any) -> Any:
        raise self._refused()

    __bool__ = __getitem__ = __getattr__

    def _refused(self) -> CaptureError:
        name = vars(self)["is_named"]
        return CaptureError(
            f"pass {name} as an argument of its own: it was set on another tensor as an "
            f"attribute{line_of_user()}, and each step of a plan would read that of the first "
            "batch"
        )


def kept_attributes(leaf: object) -> _Attributes:
    given = attributes_of(leaf) if isinstance(leaf, Tensor) else {}
    own = {name: one for name, one in given.items() if not name.startswith(_BY_TORCH)}
    return {name: _for_signature(name, value) for name, value in own.items()}


def _for_signature(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _OfTensor(name)  # a signature holds no tensor
    return copied(value) if isinstance(value, CONTAINERS) else value  # the user's may change


def with_attributes_of(tensor: Tensor, copy: _Copy) -> _Copy:
    for name, value in attributes_of(tensor).items():
        setattr(copy, name, value)
    return copy


def first_other(
    before: Mapping[str, Any], tensor: Tensor, names: Collection[str]
) -> tuple[str, Any, Any] | None:
    """The first attribute that is not as it was: name, was and is. `names`: those code may load."""
    now = attributes_of(tensor)
    for name in sorted((before.keys() | now.keys()) & set(names)):
        if name.startswith(_BY_TORCH):
            continue
        was, found = before.get(name, MISSING), now.get(name, MISSING)
        # Had code read the tensor, it would have been refused.
        is_unread = isinstance(was, _OfTensor) and isinstance(found, Tensor)
        if not is_unread and not is_same(found, was):
            return name, was, found
    return None


class StandIns:
    """Gives tensors of a trace the attributes of theirs. `on_batch`: what was set, by leaf."""

    def __init__(self, step: nn.Module, on_batch: Sequence[tuple[str, _Attributes]]) -> None:
        self._on_batch = on_batch
        self._of_state = {path: dict(attributes_of(t)) for path, t in _tensors_of(step).items()}
        self._given: list[tuple[str, Tensor, _Attributes]] = []

    def give(self, step: nn.Module, leaves: Sequence[Any]) -> None:
        now = _tensors_of(step)
        pairs = [(path, tensor, self._of_state.get(path, {})) for path, tensor in now.items()]
        for (name, given), leaf in zip(self._on_batch, leaves, strict=False):
            if isinstance(leaf, Tensor):
                pairs.append((name, leaf, given))
        self._given = [(text, one, _set(one, given)) for text, one, given in pairs]

    def require_unwritten(self, kind: str) -> None:
        for text, tensor, before in self._given:
            now, of = _own(tensor), text.removeprefix("model.")  # the traced module's name for it
            for name in before.keys() | now.keys():
                if before.get(name, MISSING) is not now.get(name, MISSING):
                    raise CaptureError(
                        f"set {name} on a module, or outside forward: forward of {kind} sets it on "
                        f"the tensor {of}, and a step that follows a plan would not"
                    )


def _set(tensor: Tensor, given: _Attributes) -> _Attributes:
    for name, value in given.items():
        if name not in vars(tensor):
            setattr(tensor, name, value)
    return _own(tensor)


def _own(tensor: Tensor) -> _Attributes:
    return {name: value for name, value in vars(tensor).items() if not name.startswith(_BY_TORCH)}


def _tensors_of(step: nn.Module) -> dict[str, Tensor]:
    parameters = dict(step.named_parameters(remove_duplicate=False))
    return parameters | dict(step.named_buffers(remove_duplicate=False))


_BY_TEXT = {"setattr", "delattr", "globals", "vars", "exec", "eval", "__dict__", "__setattr__"}
"""Names by which code writes to a namespace without naming what it writes."""


class Writer(enum.Enum):
    FORWARD = enum.auto()  # or nobody knows
    THREAD = enum.auto()  # and forward may have read it


def writer_of(place: StateSlot | OpaqueState | Stream, ran: ExecutedCode) -> Writer:
    """Who has changed `place`, by the code that forward ran, all of it."""
    if isinstance(place, (OpaqueState, Stream, ModuleHooks)):
        return Writer.FORWARD
    # A library's thread may count at any moment. What forward writes, its own code stores.
    name = place.key if isinstance(place, (DictItem, SlotAttr)) else None
    own = ran.own_codes()
    by_name = (one for c in own if name in c.co_names for one in dis.get_instructions(c))
    if any(x.opname.startswith(("STORE_", "DELETE_")) and x.argval == name for x in by_name):
        return Writer.FORWARD
    by_text = any(not _BY_TEXT.isdisjoint(code.co_names) for code in own)
    if not isinstance(name, str) or by_text or threading.active_count() == 1:
        return Writer.FORWARD
    return Writer.THREAD


def other_threads() -> str:
    own = threading.current_thread()
    return ", ".join(sorted(one.name for one in threading.enumerate() if one is not own))
