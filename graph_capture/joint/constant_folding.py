"""Values that depend on nothing but code are known while a trace holds no values.

Libraries make positions and masks by `torch.arange` and its like, and branch on them: transformers
leaves a mask away if positions count up. Values that depend on the batch, parameters, buffers or
random numbers are unknown; where code looks at those, the arguments that they come from are named.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from remat.graph_capture.distributed.sharding import NAMESPACES
from remat.graph_capture.joint.nodes import bits_of, storage_key, written_arguments
from remat.graph_capture.python_state.executed_code import without_recording
from remat.graph_capture.sizes.symbols import Sizes
from remat.graph_capture.torch_private.core import (
    FunctionalTensor,
    OpOverload,
    TraceObserver,
    disable_current_modes,
    pytree,
)

RANDOM = "a random number"  # among what the values that code looks at come from

_MOST_ELEMENTS = 1 << 20  # of elements that are kept: more would be slow, and code asks for few

_UNFILLED = ("empty", "new_empty")  # of ops that give whatever memory held, by how names begin

_CLONE = torch.ops.aten.clone.default
_LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_LOOKS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MODEL = ""  # the source of what parameters and buffers have a part in


class ConstantFolder(TraceObserver):
    """Runs ops on known values too, beside the trace, and answers code that looks at them."""

    def __init__(
        self, batch: Iterable[tuple[str, Any]] = (), over: TraceSizes | None = None
    ) -> None:
        super().__init__()
        self._over = over
        self._values, self._formulas = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._lost: dict[int, frozenset[str]] = {}
        self._sources = WeakTensorKeyDictionary()
        self.failure: Exception | None = None  # raised when code first looked at unknown values
        # Arguments that those come from, and `RANDOM`; empty if parameters or buffers have a part.
        self.read: tuple[str, ...] = ()
        self._digest, self._has_looked = hashlib.blake2b(), False
        for name, leaf in batch:
            if isinstance(leaf, Tensor):
                self._sources[leaf] = frozenset([name])

    def hold(self, tensor: Tensor, number: int) -> None:
        """All elements of a tensor of the batch are this number, at every step."""
        options = {"dtype": tensor.dtype, "device": tensor.device}
        self._keep(tensor, _run(torch.ops.aten.full.default, (list(tensor.shape), number), options))

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        inputs = _tensors_in((args, kwargs))
        if func in _LIFTED and type(inputs[0]) is Tensor:
            # `torch.tensor` makes a tensor with values, and hands it over to the trace.
            self._values[inputs[0]] = _run(_CLONE, (inputs[0],), {})
        # Alone, a rank would wait for the others.
        varies = func.namespace in NAMESPACES or _is_random(func)
        varies |= func._schema.name.partition("::")[2].startswith(_UNFILLED)
        if varies or not all(map(self._is_known, inputs)):
            return self._unknown(func, args, kwargs, inputs)
        has_symbols = any(isinstance(n, torch.SymInt) for n in pytree.tree_leaves((args, kwargs)))
        # Sizes of a range have no value yet: a formula stands for what is made of them.
        if has_symbols or any(one in self._formulas for one in inputs):
            return self._over_sizes(func, args, kwargs, inputs)
        real_args, real_kwargs = pytree.tree_map_only(Tensor, self._values.get, (args, kwargs))
        if torch.Tag.data_dependent_output in func.tags:
            self._has_looked = True
            return _run(func, real_args, real_kwargs)
        traced = without_recording(func, *args, **kwargs)
        if all(t.numel() <= _MOST_ELEMENTS and not t.is_meta for t in _tensors_in(traced)):
            self._keep(traced, _run(func, real_args, real_kwargs))
        else:
            self._forget_written(func, args, kwargs, frozenset([_MODEL]))
        return traced

    @property
    def looked_at(self) -> bytes:
        """The same for two runs whose code looked at the same values; empty if it did not look."""
        # All known values count, as code may look at one that comes from another.
        return self._digest.digest() if self._has_looked else b""

    def _over_sizes(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> Any:
        is_view = any(one.alias_info is not None for one in func._schema.returns)
        of_values = any(one not in self._formulas for one in inputs)
        if self._over is None or func._schema.is_mutable or (is_view and of_values):
            return self._unknown(func, args, kwargs, inputs)
        known_args, known = pytree.tree_map_only(Tensor, self._as_known, (args, kwargs))
        base = self._formulas.get(inputs[0]) if is_view else None
        formula = _Formula(func, known_args, known, base=base)
        if torch.Tag.data_dependent_output in func.tags:
            if (found := answer(formula, self._over, _run)) is None:
                return self._unknown(func, args, kwargs, inputs)
            self._has_looked = True
            self._digest.update(repr(found).encode())
            return found
        traced = without_recording(func, *args, **kwargs)
        for i, tensor in enumerate(_tensors_in(traced)):
            self._formulas[tensor] = dataclasses.replace(formula, item=i, numbers=[])
        return traced

    def _as_known(self, tensor: Tensor) -> Any:
        formula = self._formulas.get(tensor)
        # A formula is worked out later, and ops may write to the values by then.
        return self._values[tensor].clone() if formula is None else formula

    def _unknown(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> Any:
        found = frozenset([RANDOM] if _is_random(func) else [])  # as far as they are unknown
        unknown = (one for one in inputs if not self._is_known(one))
        sources = found.union(*map(self._sources_of, unknown)) or frozenset([_MODEL])
        self._forget_written(func, args, kwargs, sources)
        try:
            traced = without_recording(func, *args, **kwargs)
        except Exception as error:  # raised again; it is only noted here
            if self.failure is None and any(tag in func.tags for tag in _LOOKS):
                self.failure = error
                self.read = () if _MODEL in sources else tuple(sorted(sources))
            raise
        for tensor in _tensors_in(traced):
            self._sources[tensor] = sources
        return traced

    def _sources_of(self, tensor: Tensor) -> frozenset[str]:
        real, formula = self._values.get(tensor), self._formulas.get(tensor)
        if formula is not None and formula.root.lost:
            return formula.root.lost
        if real is not None:  # known once, and written to since
            return self._lost[storage_key(real)]
        found: frozenset[str] | None = self._sources.get(tensor)
        return frozenset([_MODEL]) if found is None else found

    def _is_known(self, tensor: Tensor) -> bool:
        if (formula := self._formulas.get(tensor)) is not None:
            return not formula.root.lost
        real = self._values.get(tensor)
        return real is not None and storage_key(real) not in self._lost

    def _keep(self, traced: Any, real: Any) -> None:
        for tensor, value in zip(_tensors_in(traced), _tensors_in(real), strict=True):
            self._values[tensor] = value
            self._digest.update(_bits_of(value))
            if isinstance(tensor, FunctionalTensor):
                self._values[tensor.elem] = value  # what `tolist` reads

    def _forget_written(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], to: frozenset[str]
    ) -> None:
        if func.namespace in NAMESPACES:  # whose schemas do not say what they write to
            self._lose(_tensors_in((args, kwargs)), to)
        for written in written_arguments(func, args, kwargs):
            self._lose(_tensors_in(written), to)

    def _lose(self, tensors: Iterable[Tensor], sources: frozenset[str]) -> None:
        for tensor in tensors:
            if (real := self._values.get(tensor)) is not None:
                self._lost[storage_key(real)] = sources  # by storage, as a write reaches every view
            if (formula := self._formulas.get(tensor)) is not None:
                formula.root.lost = sources


def _is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _bits_of(tensor: Tensor) -> bytes:
    with disable_current_modes(), torch.no_grad():
        if tensor.layout is not torch.strided:  # only strided numbers are in one storage
            return repr(tensor).encode()
        return bits_of(tensor).cpu().numpy().tobytes()


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with disable_current_modes(), torch.no_grad():
        return func(*args, **kwargs)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# Positions count up at every length, so a trace over a range can go eager's way at each. A value of
# sizes alone is kept as the ops that make it. Where code looks, they run at all sizes of the range,
# and the answer counts if it is the same.

_MOST_WORK = 1 << 30  # elements made to answer one question, at all sizes: a second on a CPU

_Run = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class TraceSizes(Protocol):
    def points_of(self, numbers: Iterable[Any]) -> Sequence[Sizes]:
        """All sizes of the symbols in these numbers, the largest last; none if these are many."""
        ...

    def value(self, number: Any, sizes: Sizes) -> Any:
        """A number of the trace at these sizes."""
        ...


@dataclass(eq=False)
class _Formula:
    """An op, and what it is run on: formulas, tensors with values, and numbers of the trace."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    item: int | None = None  # which of several results it is
    base: _Formula | None = None
    lost: frozenset[str] = frozenset()  # sources of what it, or a view of it, was overwritten with
    numbers: list[Any] = field(default_factory=list)  # symbolic ones in all that it is made of

    def __post_init__(self) -> None:
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, _Formula):
                self.numbers += leaf.numbers
            elif isinstance(leaf, torch.SymInt):
                self.numbers.append(leaf)

    @property
    def root(self) -> _Formula:
        """What it is a view of, or itself."""
        return self if self.base is None else self.base.root


class _Evaluation:
    """The values of formulas at one point. `work` counts the elements that were made."""

    def __init__(self, over: TraceSizes, sizes: Sizes, run: _Run) -> None:
        self._over, self._sizes, self._run = over, sizes, run
        self._made: dict[tuple[int, ...], Any] = {}
        self.work = 0

    def of(self, formula: _Formula) -> Any:
        # Formulas share parts, of which each runs once.
        key = tuple(map(id, (formula.func, *pytree.tree_leaves((formula.args, formula.kwargs)))))
        if key not in self._made:
            args, kwargs = pytree.tree_map(self._leaf, (formula.args, formula.kwargs))
            self._made[key] = self._run(formula.func, args, kwargs)
            tensors = pytree.tree_leaves(self._made[key])
            self.work += sum(one.numel() for one in tensors if isinstance(one, Tensor))
        made = self._made[key]
        return made if formula.item is None else pytree.tree_leaves(made)[formula.item]

    def _leaf(self, leaf: Any) -> Any:
        return self.of(leaf) if isinstance(leaf, _Formula) else self._over.value(leaf, self._sizes)


def answer(formula: _Formula, over: TraceSizes, run: _Run) -> Any:
    """What code that looks at a value finds at all sizes; None if that differs or they are many."""
    points = over.points_of(formula.numbers)
    found: Any = None
    for i, sizes in enumerate(reversed(points)):  # the largest first: it bounds the work of all
        one = _Evaluation(over, sizes, run)
        said = one.of(formula)
        found = found if i else said
        is_too_much = not i and one.work * len(points) > _MOST_WORK
        if is_too_much or type(said) is not type(found) or (i and said != found):
            return None
    return found
