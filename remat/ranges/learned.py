"""Which sizes of batches vary: learned from the batches of a run, or named by the user.

Places whose sizes were equal in all batches have one name, as lengths of tokens and of targets.
A place that had one size so far is fixed, unless it follows one that the user has named: sizes that
are equal may be equal by chance, so there are several ways to follow, and a model shows which is
its own. What the next batch shows otherwise is learned from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from remat.graph_capture.shapes.ranges import Symbol

Shapes = tuple[tuple[int, ...] | None, ...]
"""Of each leaf of a batch; None for one that is no tensor, or whose sizes stay as they are."""
At = tuple[int, int]
"""A leaf and a dimension."""
LEAST = 2
"""Torch runs other ops for sizes of 0 and 1, so that no range holds them."""
Follows = Callable[[At, At], bool]
WAYS: tuple[Follows, ...] = (
    lambda at, named: at[0] != named[0] and at[1] == named[1],
    lambda at, named: at[0] != named[0],
    lambda at, named: True,
    lambda at, named: False,
)
"""Which places of one size follow a named one, the likeliest first: the same dimension of other
tensors, any dimension of them, or also one of the same tensor; and none."""
GROWTH = 2
"""How many times the size that was the largest a range reaches once it has to be extended."""


@dataclass
class LearnedSizes:
    """The sizes of batches of one kind.

    Attributes
    ----------
    names : of places, for symbols: ``tokens_1``. given : symbols that the user has named, by place;
        None to learn them. upto : the largest size at a place, where the user says so.
    told : batches that something was learned from. planned : ranges of plans, by symbol.
    unfit : why sizes of this kind cannot vary within one plan; empty where they can.
    """

    names: Mapping[At, str]
    given: Mapping[At, Symbol] | None = None
    upto: Mapping[At, int] = field(default_factory=dict[At, int])
    told: list[Shapes] = field(default_factory=list[Shapes])
    planned: dict[str, Symbol] = field(default_factory=dict[str, Symbol])
    unfit: str = ""
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
        while self._groups == before and self._way < len(WAYS) - 1:
            self._way += 1
            self._groups = self._grouped()
        return self._groups != before

    def follow_as_at_first(self) -> None:
        """Have other places follow in the likeliest way, as no other one was better."""
        if self.given is None:
            self._way = 0
            self._groups = self._grouped()

    def symbols_at(self, shapes: Shapes) -> dict[At, str]:
        """The symbol of each place that varies, but for sizes that no range holds.

        These are 0, 1 and what is no multiple of a step that the user has named.
        """
        if self.unfit:
            return {}
        return {at: name for at, name in self._groups.items() if self._may_vary(at, shapes)}

    def _may_vary(self, at: At, shapes: Shapes) -> bool:
        step = self.given[at].multiple if self.given else 1
        size = _size(shapes, at)
        return size >= LEAST * step and size % step == 0

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
        size, before = _size(shapes, at), self.planned.get(name)
        named = self.given[at] if self.given else Symbol(name, LEAST, 0)
        low, multiple = min(named.low, size), named.multiple
        seen = [_size(one, at) for one in self.told]
        upto = max(self.upto.get(one, 0) for one, own in self._groups.items() if own == name)
        high = max(size, named.high, upto // multiple * multiple, *seen)
        if before is None:
            return Symbol(name, low, max(high, low + multiple), multiple), False
        low = min(low, before.low)
        if size <= before.high:
            return Symbol(name, low, before.high, multiple), False
        return Symbol(name, low, max(high, GROWTH * before.high), multiple), True

    def _is_as_known(self, shapes: Shapes) -> bool:
        groups: dict[str, int] = {}
        for at in _all_places(shapes):
            name, size = self._groups.get(at), _size(shapes, at)
            if name is None and size != _size(self.told[0], at):
                return False
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
                group = (*sizes[at], self.upto[named] if named else 0)
                found[at] = first.setdefault(group, self.names[named or at])
        return found

    def _followed(
        self, at: At, sizes: Mapping[At, tuple[int, ...]], *, has_varied: bool
    ) -> At | None:
        """The place that the user named and that another one goes with."""
        equal = [one for one in self.upto if sizes.get(one) == sizes[at]]
        if not has_varied:
            equal = [one for one in equal if WAYS[self._way](at, one)]
        return min(equal, key=lambda one: one[1] != at[1], default=None)


def _all_places(shapes: Shapes) -> Sequence[At]:
    return [(i, dim) for i, shape in enumerate(shapes) if shape for dim in range(len(shape))]


def _size(shapes: Shapes, at: At) -> int:
    shape = shapes[at[0]]
    assert shape is not None
    return shape[at[1]]
