"""What users set on tensors by name, as in ``x.gain = 2.0``: seen while traced, and compared.

A trace runs on stand-ins of tensors, which get the attributes of those that they stand for. An
attribute that is a tensor itself would be one tensor for all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.python_state.library_objects import attributes_of
from remat.graph_capture.python_state.places import CONTAINERS, MISSING, copied, is_same

Attributes = dict[str, Any]
_BY_TORCH = ("_dynamo_", "_remat_", "_is_", "elem", "persistent")


class OfTensor:
    """In the place of a tensor that was set on a tensor: a signature holds none."""


def kept_attributes(leaf: object) -> Attributes:
    """What a user has set on a tensor, with copies of containers."""
    given = attributes_of(leaf) if isinstance(leaf, Tensor) else {}
    return {name: _kept(value) for name, value in given.items() if not name.startswith(_BY_TORCH)}


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return OfTensor()
    return copied(value) if isinstance(value, CONTAINERS) else value


def with_attributes_of(tensor: Tensor, copy: Tensor) -> Tensor:
    """`copy`, with what a user has set on `tensor`."""
    for name, value in attributes_of(tensor).items():
        setattr(copy, name, value)
    return copy


def first_other(
    before: Mapping[str, Any], tensor: Tensor, names: Collection[str]
) -> tuple[str, Any, Any] | None:
    """The first attribute of a tensor that is not as it was: its name, what it was and what it is.

    Parameters
    ----------
    names : those that code may load.
    """
    now = attributes_of(tensor)
    for name in sorted((before.keys() | now.keys()) & set(names)):
        if name.startswith(_BY_TORCH):
            continue
        was, found = before.get(name, MISSING), now.get(name, MISSING)
        if not is_same(found, was):
            return name, was, found
    return None


class StandIns:
    """Gives the tensors of a trace the attributes of those that they stand for.

    Parameters
    ----------
    step : whose parameters and buffers are traced. names : of the batch's leaves.
    of_batch : what was set on each of those.
    """

    def __init__(
        self, step: nn.Module, names: Sequence[str] = (), of_batch: Sequence[Attributes] = ()
    ) -> None:
        self._names = list(names)
        self._of_batch, self._of_state = list(of_batch), dict[str, Attributes]()
        for path, tensor in _tensors_of(step).items():
            if given := attributes_of(tensor):
                self._of_state[path] = dict(given)
        self._given: list[tuple[str, Tensor, Attributes]] = []

    def give(self, step: nn.Module, leaves: Sequence[Any]) -> None:
        """Let the stand-ins, in `step` and in the batch, have the attributes.

        Raises
        ------
        CaptureError : one of the batch is a tensor.
        """
        now = _tensors_of(step)
        pairs = [(path, tensor, self._of_state.get(path, {})) for path, tensor in now.items()]
        for name, leaf, given in zip(self._names, leaves, self._of_batch, strict=False):
            if isinstance(leaf, Tensor):
                _refuse_tensors(name, given)
                pairs.append((name, leaf, given))
        self._given = [(text, one, _set(one, given)) for text, one, given in pairs]

    def require_unwritten(self, kind: str) -> None:
        """Raise `CaptureError` if forward has set an attribute of one of them."""
        for text, tensor, before in self._given:
            now, of = _own(tensor), text.removeprefix("model.")
            for name in before.keys() | now.keys():
                if before.get(name, MISSING) is not now.get(name, MISSING):
                    raise CaptureError(
                        f"set {name} on a module, or outside forward: forward of {kind} sets it on "
                        f"the tensor {of}, and a step that follows a plan would not"
                    )


def _refuse_tensors(text: str, given: Attributes) -> None:
    for name, value in given.items():
        if isinstance(value, OfTensor):
            raise CaptureError(
                f"pass {name} of {text} as an argument of its own: it is a tensor that was set on "
                "another one, and each step of a plan would read that of the first batch"
            )


def _set(tensor: Tensor, given: Attributes) -> Attributes:
    for name, value in given.items():
        if name not in vars(tensor):
            setattr(tensor, name, value)
    return _own(tensor)


def _own(tensor: Tensor) -> Attributes:
    space = vars(tensor)
    return {name: value for name, value in space.items() if not name.startswith(_BY_TORCH)}


def _tensors_of(step: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(step.named_parameters(remove_duplicate=False)),
        **dict(step.named_buffers(remove_duplicate=False)),
    }
