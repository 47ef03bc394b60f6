"""Results that training does not use: a step leaves them out, and a placeholder says so when read.

A result that is returned stays in memory until forward ends, and its producer stays whole.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from remat.graph_capture.errors import CaptureError, LeftOutError
from remat.graph_capture.python_state.state_slots import PLAIN
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.outputs import flatten_dataclasses, open_dataclass

Outputs = tuple[str | int, ...]  # names and positions of the results that training uses
THE_LOSS: Outputs = ("loss", 0)
"""What trainers read, by name or in a tuple. Where a model returns neither, nothing is left out."""


class LeftOut:
    """In the place of a result that the step does not return. All that reads it is an error."""

    __slots__ = ("_remat_name", "_remat_outputs")

    def __init__(self, name: str | int, outputs: Outputs | None) -> None:
        self._remat_name, self._remat_outputs = name, outputs

    def __repr__(self) -> str:
        return f"<{self._remat_name!r}, left out of the training step>"

    def __reduce__(self) -> Any:
        return LeftOut, (self._remat_name, self._remat_outputs)

    def __getattr__(self, _: str) -> NoReturn:
        raise _error(self)

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, *given: Any) -> NoReturn:
        leaves = pytree.tree_leaves(given, is_leaf=lambda part: isinstance(part, cls))
        raise _error(next(leaf for leaf in leaves if isinstance(leaf, cls)))


def _error(one: LeftOut) -> LeftOutError:
    name, outputs = one._remat_name, one._remat_outputs
    if outputs is None:
        return LeftOutError(
            f"read {name!r} in eval mode or under torch.no_grad(): a training step that is planned "
            "returns no object that holds tensors where torch cannot find them"
        )
    way = f"leave out outputs=..., or name {name!r} in it"
    if outputs == THE_LOSS:
        way = f"pass outputs=('loss', {name!r}) to remat.rematerialize"
    return LeftOutError(
        f"{way}: result {name!r} was read, and the planned training step returns only "
        f"{', '.join(map(repr, outputs))}"
    )


def _refuse_read(one: LeftOut, *_: Any, **__: Any) -> NoReturn:
    raise _error(one)


_OF_COPIES = {"__deepcopy__", "__setstate__", "__torch_dispatch__", "__array_wrap__"}
_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
# What a tensor answers without its name being asked for: Python looks these up on the class.
for _name in _COMPARED | {*dir(Tensor)}.difference(dir(LeftOut), _OF_COPIES):
    if _name.startswith("__") and inspect.isroutine(getattr(Tensor, _name)):
        setattr(LeftOut, _name, _refuse_read)

# As a container of nothing, it comes back in each result, and no graph has to hold it.
pytree.register_pytree_node(
    LeftOut,
    lambda one: ([], (one._remat_name, one._remat_outputs)),
    lambda _, facts: LeftOut(*facts),  # pyright: ignore
)


def as_outputs(given: Any) -> Outputs | None:
    """`outputs` as a user gives it: None, a name or a position, or several."""
    if given is None:
        return None
    names = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if not names or any(type(one) not in (str, int) for one in names):
        raise CaptureError(
            "give outputs=('loss',), the names of the results that training uses, or their "
            f"positions in a tuple: outputs={given!r} names none"
        )
    return names


def used_alone(result: Any, outputs: Outputs | None) -> Any:
    """What forward returned, with a `LeftOut` for each part that `outputs` does not name.

    With None, for caches alone that are for the next word of a text, which no graph can return.
    """
    whole = open_dataclass(result)
    at = id(whole)  # by number: torch's function refers to itself and would hold a tree
    parts, spec = pytree.tree_flatten(whole, is_leaf=lambda part: id(part) != at)
    named = whole if isinstance(result, Mapping) else () if whole is result else whole.values
    names: list[Any] = list(named or getattr(result, "_fields", range(len(parts))))
    if spec.is_leaf():  # it has no parts
        names, parts = [], []
    if outputs is not None and not _are_known(result, names, outputs):
        outputs = None
    left = [
        part if _stays(name, part, outputs) else LeftOut(name, outputs)
        for name, part in zip(names, parts, strict=True)
    ]
    if all(map(operator.is_, left, parts)):
        return result
    made = pytree.tree_unflatten(left, spec)
    return made if whole is result else made.closed()


def _stays(name: str | int, part: Any, outputs: Outputs | None) -> bool:
    if outputs is None:
        is_known = type(part) in pytree.SUPPORTED_NODES or open_dataclass(part) is not part
        return is_known or not type(part).__name__.endswith("Cache")
    # Numbers and the like cost nothing, and code asks whether a result is None.
    return name in outputs or isinstance(part, PLAIN)


def names_left_out(result: Any) -> tuple[str, ...]:
    parts = pytree.tree_leaves(
        flatten_dataclasses(result), is_leaf=lambda part: isinstance(part, LeftOut)
    )
    return tuple(str(part._remat_name) for part in parts if isinstance(part, LeftOut))


def _are_known(result: Any, names: list[Any], outputs: Outputs) -> bool:
    """Whether `outputs` names parts of a result; an error if it names what no result has."""
    # Hugging Face's results leave out keys of fields that are None.
    fields = dataclasses.fields(result) if dataclasses.is_dataclass(result) else ()
    known = list(dict.fromkeys([*names, *(field.name for field in fields)]))
    kinds = {type(name) for name in known}
    wrong = [one for one in outputs if one not in known and type(one) in kinds]
    if not wrong and any(one in names for one in outputs):
        return True
    if outputs == THE_LOSS:
        return False
    if not known:
        raise CaptureError(
            f"leave out outputs={outputs}: forward returns a result that has no parts"
        )
    raise CaptureError(
        f"name some of {', '.join(map(repr, known))} in outputs: forward returns no "
        f"{(wrong or outputs)[0]!r}"
    )


_HANDS_ON = ("torch", "accelerate", "remat")  # packages that look at no result


def outputs_of_caller(model: nn.Module) -> Outputs | None:
    """The loss, in a call by `Trainer.compute_loss` of Hugging Face that reads no more; or None."""
    frame: Any = sys._getframe(1)
    while frame is not None and _name_of_code(frame).partition(".")[0] in _HANDS_ON:
        frame = frame.f_back
    # Of its own code, not of a subclass: what lies between, as a wrapper or a hook, may read more.
    if frame is None or frame.f_code.co_qualname != "Trainer.compute_loss" or model._forward_hooks:
        return None
    is_known = _name_of_code(frame) == "transformers.trainer" and _reads_the_loss_alone(frame)
    return THE_LOSS if is_known else None


def _name_of_code(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _reads_the_loss_alone(frame: Any) -> bool:
    found = frame.f_locals
    trainer = found["self"]
    reads_more = (
        found["return_outputs"],
        found.get("labels") is not None,  # taken out of the batch for a loss of the trainer's
        getattr(trainer, "compute_loss_func", None),
        getattr(trainer.args, "past_index", -1) >= 0,  # of transformers 4
    )
    return not any(reads_more)
