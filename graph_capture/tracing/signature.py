"""What a batch looked like at capture, and whether another one is like it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from remat.graph_capture.devices.placement import check_placement
from remat.graph_capture.errors import CaptureError, SignatureError
from remat.graph_capture.python_state.state_slots import PLAIN, is_same
from remat.graph_capture.python_state.tensor_attributes import kept_attributes
from remat.graph_capture.refusals import refuse_subclass
from remat.graph_capture.torch_private.core import FakeTensorMode, pytree

_Path = tuple[Any, ...]


def leaves_with_paths(tree: Any) -> list[tuple[_Path, Any]]:
    """All leaves in the order of `tree_flatten`, each with its path as `keystr` reads it."""
    return list(_below((), tree))


def _below(path: _Path, tree: Any) -> Iterator[tuple[_Path, Any]]:
    whole = id(tree)  # by number: torch's function refers to itself and would hold a tree
    parts, spec = pytree.tree_flatten(tree, is_leaf=lambda part: id(part) != whole)
    if spec.is_leaf():
        yield path, tree
        return
    # Torch has paths only through containers with named parts. Others, as diffusers', are numbered.
    named = pytree.SUPPORTED_NODES[spec.type].flatten_with_keys_fn
    keys = map(pytree.SequenceKey, range(len(parts)))
    if named is not None:
        keys = (key for key, _ in named(tree)[0])
    for key, part in zip(keys, parts, strict=True):
        yield from _below((*path, key), part)


_OTHER_SHAPE = (
    "drop or pad the last batch (DataLoader(drop_last=True)), or make another plan for this shape"
)
_OTHER_DIMENSIONS = (
    "pass tensors of as many dimensions, or make another plan: a plan holds for one number of them"
)
_OTHER_DTYPE = (
    "plan for what it is cast to, with remat.Sharding(..., param_dtype=...): a plan holds for one "
    "dtype, and something casts later, as FSDP's MixedPrecisionPolicy does.\n"
    "Or leave out the policy, and plan and train under torch.autocast, or plan model.to({dtype})"
)
_OTHER_KIND = "pass it .to({dtype}), or make another plan: a plan holds for one dtype"
_OTHER_DEVICE = "pass it .to({device!r}), or make another plan: a plan holds for one device"
_OTHER_LAYOUT = "pass it {way}, or make another plan: a plan holds for one memory layout"
_NEEDS_GRADIENT = (
    "pass .detach() of it: this plan computes no gradient of it. If you want one, make another "
    "plan with an input that requires grad"
)
_NEEDS_NONE = (
    "call .requires_grad_() on it, or plan with an input that does not require grad: this plan "
    "computes its gradient"
)
_OTHER_VALUE = (
    "pass the planned value, or call remat.rematerialize without a batch, which makes a plan for "
    "each: a plan holds for one value of anything but a tensor.\n"
    "What changes at every step should be a tensor"
)
_MOST_SHOWN = 3  # of the shapes of a batch, in one line
_NO_TENSOR = "pass a tensor there, as at capture, or make another plan"


class Signature:
    """Shapes, strides, dtypes and devices of a batch's tensors, none of which it holds."""

    def __init__(self, batch: Any) -> None:
        paths, self.spec = leaves_with_paths(batch), pytree.tree_structure(batch)
        self.names = [argument_name(path) for path, _ in paths]
        leaves = [leaf for _, leaf in paths]
        self.tensors = [tensor_facts(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.attributes = [kept_attributes(leaf) for leaf in leaves]
        # `firsts`: by leaf, the first that is the same tensor; `as_one`: batches are held to that.
        self.firsts, self.as_one = first_places(leaves), False
        # By place of a tensor of integers or bools, what all elements are, None where they differ:
        # here, and in all batches of the plan where code looks, as at a mask of ones.
        self.numbers: Mapping[int, int | None] = {}
        self.held_numbers: Mapping[int, int | None] = {}

    @property
    def has_target(self) -> bool:
        leaves = zip(self.names, self.tensors, self.others, strict=True)
        of_target = (values for name, *values in leaves if name.startswith("target"))
        return any(one is not None for values in of_target for one in values)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {n: facts.dtype for n, facts in zip(self.names, self.tensors, strict=True) if facts}

    def with_attributes_of(self, names: Collection[str]) -> Self:
        """The same, with only those attributes of tensors that have these names."""
        other = copy.copy(self)
        other.attributes = [
            {name: value for name, value in one.items() if name in names} for one in self.attributes
        ]
        return other

    def held_to_numbers(self, names: Collection[str]) -> Self:
        """The same for batches in which these arguments are one number as here, or as here not."""
        read = {i: number for i, number in self.numbers.items() if self.names[i] in names}
        other = copy.copy(self)
        other.held_numbers = {**self.held_numbers, **read}
        return other

    def with_tensors_as_one(self) -> Self:
        other = copy.copy(self)
        other.as_one = True
        return other

    @property
    def title(self) -> str:
        shapes = ((str(one.dtype), list(one.shape)) for one in self.tensors if one)
        texts = (f"{dtype.removeprefix('torch.')}{shape}" for dtype, shape in shapes)
        distinct = list(dict.fromkeys(texts))
        more = f" and {len(distinct) - _MOST_SHOWN} more" * (len(distinct) > _MOST_SHOWN)
        return ", ".join(distinct[:_MOST_SHOWN]) + more or "no tensors"

    def lines(self) -> tuple[str, ...]:
        """One line a leaf, as kept in a graph and in a plan."""
        numbers = {i: f", {_text_of(number)}" for i, number in self.held_numbers.items()}
        return tuple(
            f"{name}: {_facts_text(facts) if facts else repr(other)}{numbers.get(i, '')}"
            for i, (name, facts, other) in enumerate(
                zip(self.names, self.tensors, self.others, strict=True)
            )
        )

    def other_number(self, leaves: Sequence[Any]) -> tuple[str, str, str] | None:
        """The first argument whose elements are not as they have to be: its name, was and is."""
        for place, number in self.held_numbers.items():
            found = _one_number(leaves[place]) if isinstance(leaves[place], Tensor) else None
            if found != number:
                return self.names[place], _text_of(number), _text_of(found)
        return None

    def example(self, mode: FakeTensorMode) -> Any:
        return self._example(mode, self.tensors)

    def example_of(self, tensors: Sequence[TensorFacts | None]) -> Any:
        """As `example`, of other facts."""
        return self._example(FakeTensorMode(), tensors)

    def _example(self, mode: FakeTensorMode, tensors: Sequence[TensorFacts | None]) -> Any:
        with mode:
            leaves = [
                other if facts is None else _empty_tensor(facts)
                for facts, other in zip(tensors, self.others, strict=True)
            ]
        return pytree.tree_unflatten(leaves, self.spec)

    def require(self, leaves: list[Any], spec: Any, model: str) -> None:
        """Raise `SignatureError`, naming the first leaf that differs from capture."""
        if spec != self.spec:
            given = leaves_with_paths(pytree.tree_unflatten(leaves, spec))
            names = [argument_name(path) for path, _ in given]
            more = ", ".join(name for name in names if name not in self.names)
            less = ", ".join(name for name in self.names if name not in names)
            parts = ", ".join([f"with {more}"] * bool(more) + [f"without {less}"] * bool(less))
            raise SignatureError(
                f"call it as at capture, or capture and solve again: {model} was planned for "
                f"arguments ({', '.join(self.names)}) and is called {parts or 'with others'}"
            )
        for i, leaf in enumerate(leaves):
            planned, found = self.tensors[i], None
            if isinstance(leaf, Tensor):
                found = tensor_facts(leaf)
            if planned == found and (found is not None or is_same(leaf, self.others[i])):
                continue
            way = _OTHER_VALUE
            if planned is not None:
                way = _NO_TENSOR if found is None else _way_out(planned, found)
            was = repr(self.others[i]) if planned is None else _facts_text(planned)
            now = repr(leaf) if found is None else _facts_text(found)
            raise SignatureError(
                f"{way}. {model} was planned for {self.names[i]} = {was} and is called with {now}"
            )


_MOST_ELEMENTS = 1 << 20  # beyond it nobody branches on the values


def numbers_in(leaves: Sequence[Any]) -> dict[int, int | None]:
    """By place, as of `Signature.numbers`."""
    return {
        i: _one_number(leaf)
        for i, leaf in enumerate(leaves)
        if type(leaf) is Tensor and not (leaf.is_floating_point() or leaf.is_complex())
        if 0 < leaf.numel() <= _MOST_ELEMENTS and not leaf.is_meta
    }


def _one_number(leaf: Tensor) -> int | None:
    first: Any = leaf.flatten()[0]
    return first.item() if bool((leaf == first).all()) else None


def _text_of(number: int | None) -> str:
    return "not all the same" if number is None else f"all {number}"


def first_places(leaves: Sequence[Any]) -> list[int]:
    """For each leaf, the number of the first one that is the same tensor: it may be itself."""
    known: dict[int, int] = {}
    return [
        known.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i
        for i, leaf in enumerate(leaves)
    ]


class TensorFacts(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def tensor_facts(t: Tensor) -> TensorFacts:
    return TensorFacts(t.shape, t.stride(), t.dtype, t.device, t.requires_grad)


def _way_out(planned: TensorFacts, found: TensorFacts) -> str:
    if len(found.shape) != len(planned.shape):
        return _OTHER_DIMENSIONS
    if found.shape != planned.shape:
        return _OTHER_SHAPE
    if found.dtype != planned.dtype:
        # A float of another dtype was probably cast on the way, as FSDP's policy does.
        if planned.dtype.is_floating_point and found.dtype.is_floating_point:
            return _OTHER_DTYPE.format(dtype=found.dtype)
        return _OTHER_KIND.format(dtype=planned.dtype)
    if found.device != planned.device:
        return _OTHER_DEVICE.format(device=str(planned.device))
    if found.stride != planned.stride:
        is_plain = planned.stride == torch.empty(planned.shape, device="meta").stride()
        return _OTHER_LAYOUT.format(way=".contiguous()" if is_plain else "laid out as at capture")
    return _NEEDS_NONE if planned.requires_grad else _NEEDS_GRADIENT


def _facts_text(facts: TensorFacts) -> str:
    shape, stride, dtype, device, requires_grad = facts
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
    if stride != torch.empty(shape, device="meta").stride():
        text += f", strides {list(stride)}"
    return text + (", requires_grad" if requires_grad else "")


def _empty_tensor(facts: TensorFacts) -> Tensor:
    shape, stride, dtype, device, requires_grad = facts
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return made.requires_grad_(requires_grad)


def argument_name(path: Any) -> str:
    """``args[0]``, ``kwargs['mask']`` or ``target`` for a path into (args, kwargs, target)."""
    head = ("args", "kwargs", "target")[path[0].idx]
    return head + pytree.keystr(path[1:])


def unknown_leaf_message(name: str, leaf: Any) -> str:
    kind = type(leaf)
    if dataclasses.is_dataclass(kind):
        way = f"register it once, with torch.export.register_dataclass({kind.__name__})"
    elif isinstance(leaf, Mapping):
        way = "pass dict(...) of it"
    elif isinstance(leaf, np.ndarray):
        way = "pass torch.from_numpy(...) of it"
    elif kind.__name__.endswith("Cache"):
        # Models that generate text return one for the next word unless told not to.
        way = "pass use_cache=False, or set model.config.use_cache"
        way += " = False"
    else:
        way = (
            "pass its tensors, or register it once: "
            f"torch.utils._pytree.register_pytree_node({kind.__name__}, flatten, unflatten)"
        )
    return (
        f"{way}: {name} is a {kind.__qualname__}, whose tensors torch cannot find to put them in "
        "a graph"
    )


def check_batch(batch: Any, device: str) -> None:
    for path, leaf in leaves_with_paths(batch):
        name = argument_name(path)
        if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
            raise CaptureError(
                f"pass a dense tensor: {name} is a {leaf.layout} tensor, and only strided ones "
                "can be planned"
            )
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise CaptureError(unknown_leaf_message(name, leaf))
        if isinstance(leaf, Tensor):
            refuse_subclass(name, leaf)
            if leaf.is_meta:
                raise CaptureError(f"pass a tensor with storage: {name} is on the meta device")
            check_placement(name, leaf.device, device)
