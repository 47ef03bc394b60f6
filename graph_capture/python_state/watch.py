"""Compares the places of a walk with what they were, all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import nn

from remat.graph_capture.python_state.compiled_test import ObjectNames, compiled_test
from remat.graph_capture.python_state.hidden import Hidden, Stream, stream
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.places import (
    MISSING,
    Cell,
    Contents,
    Entry,
    Place,
    Slot,
    is_same,
)
from remat.graph_capture.python_state.ran import CodeThatRan
from remat.graph_capture.python_state.reachable import Walk
from remat.graph_capture.python_state.watched_dicts import Watched, WatchedDicts
from remat.graph_capture.python_state.writers import Writer, writer_of


@dataclass(frozen=True)
class Change:
    """A place whose value is not what it was."""

    text: str
    before: Any
    now: Any
    place: Place | Hidden | Stream


@dataclass(frozen=True)
class Reach:
    """The places that some code may read: `keys` of them, and names `absent` by namespace.

    `of_tensors` are the names that it may load of a tensor.
    """

    keys: set[tuple[int, Any]]
    absent: dict[int, set[str]]
    of_tensors: set[str]

    def holds(self, place: Place | Hidden) -> bool:
        """Whether it is one of them."""
        holder, name = _key(place)
        # An item of a dictionary that has grown is read where the dictionary is.
        is_known = (holder, name) in self.keys or (holder, None) in self.keys
        return is_known or name in self.absent.get(holder, ())


class PythonState:
    """Python's state that forward and the loss may read, as it is when this is made.

    Parameters
    ----------
    model : the user's. loss_fn : as captured.

    Attributes
    ----------
    of_tensors : names that code may load of a tensor, as it does where a user has set them.
    asks_identity : whether code may ask if two objects are one, as ``query is key``.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> None:
        self._roots: tuple[nn.Module, Any] = model, loss_fn
        found = Walk(model, loss_fn).found
        self.places, self.watched, self.caches = found.places, found.watched, found.caches
        self.streams = found.streams
        self.stores, self._reads, self._kinds = found.stores, found.reads, found.kinds
        self._texts, self.of_tensors = found.texts, found.of_tensors
        self.asks_identity = True
        self.grown: list[Contents] = []
        self._caches_before = [cache.cache_info().currsize for cache in self.caches]
        self._test: Callable[[], bool] | None = None
        self.ran: CodeThatRan | None = None
        self._reached: tuple[int, Reach] | None = None

    def reads(self, space: dict[str, Any], name: str) -> bool:
        """Whether code may load that name of the instance whose ``__dict__`` this is."""
        return name in self._reads.get(id(space), ()) or name in self._texts

    def changes(self) -> list[Change]:
        """Places that hold something else now, by what values are and not by who they are.

        Generators of random numbers too, though not in `first_change`: they may move between steps.
        """
        moved = [Change(one.text, "", "", one) for one in self.streams if one.has_moved()]
        return [*self._changed_places(), *self._appeared(), *moved]

    def _changed_places(self) -> Generator[Change]:
        for place in self.places:
            now = place.now()
            if not is_same(now, place.value):
                yield Change(place.text, place.value, now, place)

    def _appeared(self) -> Generator[Change]:
        for text, space, names in self.watched:
            for name in sorted(space.keys() & names):
                place = Entry(f"{text}.{name}".lstrip("."), space, name, MISSING)
                yield Change(place.text, self._of_class(space, name), space[name], place)

    def _of_class(self, space: dict[str, Any], name: str) -> Any:
        """What an instance had from its class before it had a value of its own."""
        return getattr(self._kinds.get(id(space)), name, MISSING)

    def writer(self, place: Place | Hidden | Stream, *, in_backward: bool = False) -> Writer:
        """Who has changed a place while `ran` was noted.

        Parameters
        ----------
        in_backward : which may run hooks in a thread of its own.
        """
        ran = self.ran
        if ran is None or not ran.is_all or (in_backward and ran.may_run_in_backward()):
            return Writer.FORWARD
        return writer_of(place, ran, lambda one: self._reach(ran).holds(one))

    def restore(self) -> None:
        """Put all places back, empty caches that were filled, and remove what appeared.

        What another thread has written stays.
        """
        for place in self.places:
            now = place.now()
            if not is_same(now, place.value) and self.writer(place) is not Writer.FORWARD:
                continue
            if isinstance(place, Contents) or now is not place.value:
                place.put(place.value)
        for _, space, names in self.watched:
            for name in space.keys() & names:
                if self.writer(Entry(name, space, name, MISSING)) is Writer.FORWARD:
                    del space[name]
        for one in self.streams:
            one.put_back()
        for cache, before in zip(self.caches, self._caches_before, strict=True):
            if cache.cache_info().currsize != before:
                cache.cache_clear()

    @contextlib.contextmanager
    def streams_kept(self) -> Generator[None]:
        """Leave the user's own generators of random numbers where they stand now."""
        kept = [stream(one.text, one.owner) for one in self.streams]
        try:
            yield
        finally:
            for one in filter(None, kept):
                one.put_back()

    def leave_out(self, places: Iterable[Place | Hidden]) -> None:
        """Compare these places no more, which forward itself sets."""
        gone = {_key(place) for place in places}
        if not gone:
            return
        self.places = [place for place in self.places if _key(place) not in gone]
        by_space: dict[int, set[Any]] = {}
        for holder, name in gone:
            by_space.setdefault(holder, set()).add(name)
        self.watched = [
            (text, space, names - by_space[id(space)] if id(space) in by_space else names)
            for text, space, names in self.watched
        ]
        self._test = None

    def compare_what_ran(self, ran: CodeThatRan) -> None:
        """Compare no more than the code that ran may read."""
        reach = self._reach(ran)
        self.of_tensors &= reach.of_tensors
        self.places = [place for place in self.places if reach.holds(place)]
        self.watched = [
            (text, space, absent & reach.absent[id(space)])
            for text, space, absent in self.watched
            if id(space) in reach.absent
        ]
        self._test = None

    def _reach(self, ran: CodeThatRan) -> Reach:
        """The places that the code that ran may read."""
        if self._reached is not None and self._reached[0] == ran.count:
            return self._reached[1]
        found = Walk(*self._roots, ran).found
        # At an earlier call the rest of such a function ran too.
        behind = Walk(nn.Module(), found.behind_caches).found
        keys = {_key(place) for place in (*found.places, *behind.places)}
        names: dict[int, set[str]] = {}
        for _, space, absent in (*found.watched, *behind.watched):
            names[id(space)] = names.get(id(space), set()) | absent
        of_tensors = found.of_tensors | behind.of_tensors
        self._reached = ran.count, Reach(keys, names, of_tensors)
        return self._reached[1]

    def compare_items_of(self, places: Iterable[Contents]) -> None:
        """Compare what these dictionaries hold, and nothing that they are given later."""
        grown = list(places)
        self.leave_out(grown)
        self.grown += grown
        self.places += [
            Entry(place.text, place.owner, key, value)
            for place in grown
            for key, value in place.value.items()
        ]

    def first_change(self) -> Change | None:
        """The first place that holds something else; fast where each holds the very same object."""
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            if self._test is not None and self._test():
                return None
        change = next(chain(self._changed_places(), self._appeared()), None)
        if change is None:
            # Other objects of equal values: the next test is for those.
            self._compile()
        return change

    def _compile(self) -> None:
        """One function that is true while every place holds the object that it holds now."""
        names = ObjectNames()
        by_space: dict[int, Watched] = {}
        others: list[str] = []
        for space, term in self._terms(names):
            if type(space) is dict:
                by_space.setdefault(id(space), (space, []))[1].append(term)
            else:
                others.append(term)
        entries, rest = WatchedDicts(list(by_space.values()), names), compiled_test(others, names)
        self._test = lambda: entries.hold() and rest()

    def _terms(self, names: ObjectNames) -> Generator[tuple[Any, str]]:
        """An expression for each place and each namespace, beside the mapping that it reads."""
        for place in self.places:
            space = place.space if isinstance(place, Entry) else None
            yield space, replace(place, value=place.now()).term(names)
        for _, space, _ in self.watched:
            yield space, f"len({names(space)}) == {len(space)}"


def _key(place: Place | Hidden) -> tuple[int, Any]:
    """The same for two places that are one."""
    if isinstance(place, Entry):
        # A class makes another view of its namespace at each look.
        return id(place.owner or place.space), place.key
    if isinstance(place, Slot):
        return id(place.owner), place.key
    return id(_holder(place)), None


def _holder(place: Cell | Contents | Hidden | ModuleHooks) -> Any:
    """The object that is a place as a whole."""
    if isinstance(place, ModuleHooks):
        return place.module._forward_hooks
    return place.cell if isinstance(place, Cell) else place.owner


@contextlib.contextmanager
def python_state_kept(
    model: nn.Module, loss_fn: Callable[..., Any] | None
) -> Generator[PythonState]:
    """The state as it is now, which is put back on leaving."""
    state = PythonState(model, loss_fn)
    try:
        yield state
    finally:
        state.restore()
