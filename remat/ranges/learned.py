"""Which sizes of batches vary: learned from the batches of a run, or named by the user.

Places whose sizes were equal in all batches have one name, as lengths of tokens and of targets.
A place that had one size so far is fixed. What the next batch shows otherwise is learned from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remat.graph_capture.shapes.ranges import Symbol

Shapes = tuple[tuple[int, ...] | None, ...]
"""Of each leaf of a batch; None for one that is no tensor, or whose sizes stay as they are."""
At = tuple[int, int]
"""A leaf and a dimension."""
LEAST = 2
"""Torch runs other ops for sizes of 0 and 1, so that no range holds them."""
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
        high = max(size, named.high, self.upto.get(at, 0) // multiple * multiple, *seen)
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
        first: dict[tuple[int, ...], str] = {}
        found: dict[At, str] = {}
        for at in _all_places(self.told[0]):
            sizes = tuple(_size(one, at) for one in self.told)
            if len(set(sizes)) == 1 and at not in self.upto:
                continue
            found[at] = first.setdefault((*sizes, self.upto.get(at, 0)), self.names[at])
        return found


def _all_places(shapes: Shapes) -> Sequence[At]:
    return [(i, dim) for i, shape in enumerate(shapes) if shape for dim in range(len(shape))]


def _size(shapes: Shapes, at: At) -> int:
    shape = shapes[at[0]]
    assert shape is not None
    return shape[at[1]]
