"""What a cache of plans asks of a batch: which plan could serve it, and which one to make."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from torch import Tensor, nn

from remat.graph_capture.errors import AgreementError, CaptureError, CheckError, TooLargeError
from remat.graph_capture.sizes.ranged_signature import places_in
from remat.graph_capture.sizes.symbols import Dynamic, RangeError, Symbol
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.recipe import autocast_state
from remat.graph_capture.tracing.signature import Signature, tensor_facts
from remat.ranks.same_order import any_of, gathered
from remat.rewriter.user_module.ranged import RangedModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Which sizes vary: learned, or named by the user. Places that were always equal share a name. A
# place of one size is fixed, unless it follows a named one. There are several ways to follow.

Shapes = tuple[tuple[int, ...] | None, ...]  # by leaf; None for no tensor, or sizes that stay
At = tuple[int, int]  # a leaf and a dimension
_LEAST = 2  # torch runs other ops for sizes of 0 and 1, so that no range holds them
_Follows = Callable[[At, At], bool]
_WAYS: tuple[_Follows, ...] = (
    lambda at, named: at[0] != named[0] and at[1] == named[1],
    lambda at, named: at[0] != named[0],
    lambda at, named: True,
    lambda at, named: False,
)
"""Places of equal size that follow a named one, likeliest first: the same dimension of other
tensors, any of them, or of the same tensor too; none."""
_GROWTH = 2  # times the largest size, where a range is extended


@dataclass
class LearnedSizes:
    names: Mapping[At, str]  # of places, for symbols: ``tokens_1``
    given: Mapping[At, Symbol] | None = None  # named by the user; None to learn them
    upto: Mapping[At, int] = field(default_factory=dict[At, int])  # largest sizes, if told
    told: list[Shapes] = field(default_factory=list[Shapes])  # what was learned from
    planned: dict[str, Symbol] = field(default_factory=dict[str, Symbol])  # ranges of plans
    beside: tuple[Shapes, ...] = ()  # of the batches of all ranks, as they plan together
    unfit: str = ""  # why these sizes cannot vary within one plan; empty where they can
    _groups: dict[At, str] = field(default_factory=dict[At, str])
    _way: int = 0

    def learn(self, shapes: Shapes) -> bool:
        """Take note of a batch; return whether other places vary than was thought before."""
        if self.given is not None:
            self._groups = {at: symbol.name for at, symbol in self.given.items()}
            return False
        if self.told and self._is_as_known(shapes):
            return False
        before = self._groups
        self.told.append(shapes)
        self._groups = self._grouped()
        return self._groups != before

    def follow_otherwise(self) -> bool:
        """Have other places follow those that the user named; False where no way is left."""
        if self.given is not None:
            return False
        before = self._groups
        # A way that makes the same groups would only fail again.
        while self._groups == before and self._way < len(_WAYS) - 1:
            self._way += 1
            self._groups = self._grouped()
        return self._groups != before

    def follow_as_at_first(self) -> None:
        if self.given is None:
            self._way = 0
            self._groups = self._grouped()

    def symbols_at(self, shapes: Shapes) -> dict[At, str]:
        if self.unfit:
            return {}
        return {at: name for at, name in self._groups.items() if self._may_vary(at, shapes)}

    def _may_vary(self, at: At, shapes: Shapes) -> bool:
        step = self.given[at].multiple if self.given else 1
        sizes = [_size(one, at) for one in (shapes, *self.beside)]
        # No range holds 0, 1, or what is no multiple of a step that the user has named.
        return all(size >= _LEAST * step and size % step == 0 for size in sizes)

    def ranges_for(self, shapes: Shapes) -> tuple[dict[str, Symbol], bool]:
        """Ranges that hold a batch, and whether their ends are guesses of what may come."""
        found: dict[str, Symbol] = {}
        is_guess = False
        for at, name in self.symbols_at(shapes).items():
            if name not in found:
                found[name], guessed = self._range(at, name, shapes)
                is_guess |= guessed
        return found, is_guess

    def _range(self, at: At, name: str, shapes: Shapes) -> tuple[Symbol, bool]:
        sizes, before = [_size(one, at) for one in (shapes, *self.beside)], self.planned.get(name)
        size = max(sizes)
        named = self.given[at] if self.given else Symbol(name, _LEAST, 0)
        low, multiple = min(named.low, *sizes), named.multiple
        seen = [_size(one, at) for one in self.told]
        upto = max(self.upto.get(one, 0) for one, own in self._groups.items() if own == name)
        high = max(size, named.high, upto // multiple * multiple, *seen)
        if before is None:
            return Symbol(name, low, max(high, low + multiple), multiple), False  # of two sizes
        low = min(low, before.low)
        if size <= before.high:
            return Symbol(name, low, before.high, multiple), False
        # Extended once, it may be again: doubled, so that a run has few plans.
        return Symbol(name, low, max(high, _GROWTH * before.high), multiple), True

    def _is_as_known(self, shapes: Shapes) -> bool:
        groups: dict[str, int] = {}
        for at in _all_places(shapes):
            name, size = self._groups.get(at), _size(shapes, at)
            if name is None and size != _size(self.told[0], at):  # a fixed place has varied
                return False
            # Two that had one name were equal by chance.
            if name is not None and groups.setdefault(name, size) != size:
                return False
        return True

    def _grouped(self) -> dict[At, str]:
        """Places that have varied, or that the user says do, those of equal sizes by one name."""
        places = _all_places(self.told[0])
        sizes = {at: tuple(_size(one, at) for one in self.told) for at in places}
        first: dict[tuple[int, ...], str] = {}
        found: dict[At, str] = {}
        for at in places:
            has_varied = len(set(sizes[at])) > 1
            named = at if at in self.upto else self._followed(at, sizes, has_varied=has_varied)
            if named is not None or has_varied:
                # Equal sizes of which the user says other ends are to vary apart.
                group = (*sizes[at], self.upto[named] if named else 0)
                found[at] = first.setdefault(group, self.names[named or at])
        return found

    def _followed(
        self, at: At, sizes: Mapping[At, tuple[int, ...]], *, has_varied: bool
    ) -> At | None:
        """The place that the user named and that another one goes with."""
        equal = [one for one in self.upto if sizes.get(one) == sizes[at]]
        if not has_varied:  # sizes that were equal while they varied are no chance
            equal = [one for one in equal if _WAYS[self._way](at, one)]
        return min(equal, key=lambda one: one[1] != at[1], default=None)


def _all_places(shapes: Shapes) -> Sequence[At]:
    return [(i, dim) for i, shape in enumerate(shapes) if shape for dim in range(len(shape))]


def _size(shapes: Shapes, at: At) -> int:
    shape = shapes[at[0]]
    assert shape is not None
    return shape[at[1]]


DynamicOrAuto = Dynamic | Literal["auto"]
Upto = Mapping[str | int, Any]  # by argument, ``{"tokens": {1: 2048}}``, or by name


class _Wanted(NamedTuple):
    dynamic: Dynamic | None  # ranges by leaf and dimension; None for a plan of one size
    is_guess: bool = False  # ends of ranges are guesses, so that less may be planned for


class VaryingSizes:
    def __init__(
        self, model: nn.Module, dynamic: DynamicOrAuto, upto: Upto | None,
        group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self.model, self.dynamic, self.upto = model, dynamic, dict(upto or {})
        self.group = group if group is not None and group.size() > 1 else None
        self._kinds: dict[Hashable, LearnedSizes] = {}

    def key(self, batch: Any) -> tuple[tuple[Hashable, Hashable], bool]:
        """A pair, of which the first is the kind; and whether other places vary than before."""
        leaves, spec = pytree.tree_flatten(batch)
        kind, shapes = (tuple(map(_kind_of, leaves)), spec, autocast_state()), _shapes(leaves)
        if (known := self._kinds.get(kind)) is None:
            known = self._kinds[kind] = self._first_of(batch)
        # Ranks learn together, of all their batches, or their ranges would differ.
        is_new = self.group is None and known.learn(shapes)
        symbols = known.symbols_at(shapes)
        sizes = tuple(
            tuple(symbols.get((i, dim), size) for dim, size in enumerate(shape or ()))
            for i, shape in enumerate(shapes)
        )
        return (kind, sizes), is_new

    def is_planned_by_all(self, batch: Any, *, is_served: bool) -> bool:
        """Whether ranks of a group plan now: all do where one of them has a batch without a plan.
        They have then learned of the batches of all."""
        if self.group is None or not any_of(self.group, not is_served, self.model):
            return False
        known, shapes = self.known(batch)
        found = gathered(self.group, shapes)
        if len({tuple(one is None or len(one) for one in each) for each in found}) > 1:
            raise AgreementError(
                "pass batches of the same arguments on all ranks: they differ in more than sizes, "
                "and ranks plan together"
            )
        known.beside = tuple(found)
        for one in known.beside:
            known.learn(one)
        return True

    def wanted(self, batch: Any) -> _Wanted:
        kind, shapes = self.known(batch)
        ranges, is_guess = kind.ranges_for(shapes)
        names = Signature(batch).names
        dynamic: dict[str | int, dict[int, Any]] = {}
        for (leaf, dim), name in kind.symbols_at(shapes).items():
            one = ranges[name]
            dynamic.setdefault(names[leaf], {})[dim] = one.name, one.low, one.high, one.multiple
        return _Wanted(dynamic or None, is_guess)

    def known(self, batch: Any) -> tuple[LearnedSizes, Shapes]:
        leaves, spec = pytree.tree_flatten(batch)
        kind = (tuple(map(_kind_of, leaves)), spec, autocast_state())
        return self._kinds[kind], _shapes(leaves)

    def _first_of(self, batch: Any) -> LearnedSizes:
        signature = Signature(batch)
        parameters = inspect.signature(self.model.forward).parameters
        arguments = {f"args[{i}]": name for i, name in enumerate(parameters)}
        names = {
            (i, dim): _identifier(arguments.get(name, name), dim)
            for i, name in enumerate(signature.names)
            if (facts := signature.tensors[i]) is not None
            for dim in range(len(facts.shape))
        }
        given: dict[At, Symbol] | None = None
        if not isinstance(self.dynamic, str):
            short = _LEAST, _LEAST + 1  # the range of a name alone, which batches then extend
            dynamic: Dynamic = {
                one: {dim: (x, *short) if isinstance(x, str) else x for dim, x in dims.items()}
                for one, dims in self.dynamic.items()
            }
            symbols, places = places_in(batch, self.model, dynamic)
            named = {symbol.name: symbol for symbol in symbols}
            given = {(one.leaf, one.dim): named[one.symbol] for one in places}
        return LearnedSizes(names, given, self._upto(batch, given))

    def _upto(self, batch: Any, given: Mapping[At, Symbol] | None) -> dict[At, int]:
        named = {symbol.name for symbol in (given or {}).values()}
        # A name that `dynamic` gives comes before an argument of the same name.
        by_name = {name: size for name, size in self.upto.items() if name in named}
        found = {at: by_name[s.name] for at, s in (given or {}).items() if s.name in by_name}
        rest = {name: dims for name, dims in self.upto.items() if name not in by_name}
        for argument, dims in rest.items():
            entries = cast("Mapping[int, Any]", dims).items()
            # As ranges, so that `places_in` finds and refuses as it does for `dynamic`.
            asked = {dim: (f"upto_{dim}", _LEAST, most) for dim, most in entries}
            symbols, places = places_in(batch, self.model, {argument: asked})
            high = {symbol.name: symbol.high for symbol in symbols}
            found |= {(one.leaf, one.dim): high[one.symbol] for one in places}
        return found


def _kind_of(leaf: Any) -> Hashable:
    """What no plan of another size can serve."""
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    if not leaf.is_contiguous():  # strides with gaps do not follow from sizes, so all facts count
        return tensor_facts(leaf)
    return leaf.dim(), leaf.dtype, leaf.device, leaf.requires_grad


def _shapes(leaves: list[Any]) -> Shapes:
    tensors = [one if isinstance(one, Tensor) and one.is_contiguous() else None for one in leaves]
    return tuple(None if one is None else tuple(one.shape) for one in tensors)


def _identifier(name: str, dim: int) -> str:
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', name).strip('_')}_{dim}"


_MOST_PARTS = 4  # of a range in which a guard changes its answer more often, sizes have a plan each
_MOST_NARROWED = 8  # times to narrow a range to a guard, before plans a size


def planned_over(
    sizes: VaryingSizes, batch: Any, make: Callable[..., RangedModule]
) -> RangedModule | None:
    """A plan for a range that holds a batch, or None; `TooLargeError` if the batch does not fit."""
    why, too_large, (known, _) = "", None, sizes.known(batch)
    while True:
        try:
            planned, failed = _within_guards(sizes.wanted(batch), batch, make)
        except TooLargeError as error:
            # A place that follows by chance may be what does not fit: another way may do.
            planned, failed, too_large = None, "", too_large or error
        if planned is not None:
            known.planned |= {one.name: one for one in type(planned)._remat_family.symbols}
            return planned
        why = why or failed
        if not (failed or too_large) or not known.follow_otherwise():
            break
    if too_large is not None:
        known.follow_as_at_first()  # the next batch begins with the likeliest again
        raise too_large
    if why:
        known.unfit = why
        warnings.warn(
            f"each batch size has its own plan, as sizes cannot vary within one.\n{why}",
            stacklevel=9,
        )
    return None


def _within_guards(
    wanted: _Wanted, batch: Any, make: Callable[..., RangedModule]
) -> tuple[RangedModule | None, str]:
    """A plan for the ranges that are wanted, or parts of them; else None, and why not."""
    dynamic, why = wanted.dynamic, ""
    for _ in range(_MOST_NARROWED):
        if dynamic is None:
            break
        try:
            return make(dynamic, as_far_as_fits=wanted.is_guess), ""
        except CheckError as error:
            return None, str(error)  # the model asks for what it knows at one size alone
        except CaptureError as error:
            why = str(error)
            dynamic = _with_part(dynamic, error, batch) if isinstance(error, RangeError) else None
    return None, why


def _with_part(dynamic: Dynamic, error: RangeError, batch: Any) -> Dynamic | None:
    """The ranges with that part of one in which a guard answers as it does for the batch."""
    size = _size_of(dynamic, error.symbol, batch)
    part = next(((low, high) for low, high in error.parts if low <= size <= high), None)
    # A part of one size is a plan of its own.
    if part is None or part[0] == part[1] or len(error.parts) > _MOST_PARTS:
        return None
    narrowed: Any = copy.deepcopy(dict(dynamic))
    is_other = False
    for dims in narrowed.values():
        for dim, (name, low, high, multiple) in dims.items():
            if name == error.symbol:
                is_other |= (low, high) != part  # the same range would be refused for ever
                dims[dim] = (name, *part, multiple)
    return narrowed if is_other else None


def _size_of(dynamic: Dynamic, symbol: str, batch: Any) -> int:
    leaves, names = pytree.tree_leaves(batch), Signature(batch).names
    entries = ((leaf, dim, entry) for leaf, dims in dynamic.items() for dim, entry in dims.items())
    leaf, dim = next((leaf, dim) for leaf, dim, entry in entries if entry[0] == symbol)
    return leaves[names.index(str(leaf))].shape[dim]


def is_covered_by(plan: nn.Module, other: nn.Module) -> bool:
    if not isinstance(plan, RangedModule) or not isinstance(other, RangedModule):
        return False
    ranges = {one.name: one for one in type(other)._remat_family.symbols}
    pairs = [(one, ranges.get(one.name)) for one in type(plan)._remat_family.symbols]
    return all(wide and wide.low <= one.low and one.high <= wide.high for one, wide in pairs)
