"""Compares the places of a walk with what they were, all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType, FunctionType
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
    is_same_function,
)
from remat.graph_capture.python_state.ran import CodeThatRan, runs_unseen
from remat.graph_capture.python_state.reachable import Walk
from remat.graph_capture.python_state.reached import Absent, holds_tensors
from remat.graph_capture.python_state.watched_dicts import Watched, WatchedDicts
from remat.graph_capture.python_state.writers import Writer, writer_of


@dataclass(frozen=True)
class Change:
    """A place whose value is not what it was."""

    text: str
    before: Any
    now: Any
    place: Place | Hidden | Stream


class PythonState:
    """Python's state that forward and the loss may read, as it is when this is made.

    Parameters
    ----------
    model : the user's. loss_fn : as captured.
    ran : what this code may read alone, also what runs later: each state that it comes by is as it
        was before. Left at None, what any code may read, whether it runs or not.

    Attributes
    ----------
    ran : the code that ran since this was made, where it is noted. behind_caches : functions that
        ran earlier, of which forward took results that a cache has kept.
    asks_identity : whether code may ask if two objects are one, as ``query is key``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        ran: CodeThatRan | None = None,
    ) -> None:
        self._roots: tuple[nn.Module, Any] = model, loss_fn
        self._walk = Walk(model, loss_fn, ran)
        self._found = self._walk.found
        self.grown: list[Contents] = []
        self._gone: set[tuple[int, Any]] = set()
        self._added: list[Place | Hidden] = []
        self.behind_caches: list[FunctionType] = []
        self._behind: list[Walk] = []
        self._size: tuple[int, ...] = ()
        self._test: Callable[[], bool] | None = None
        self.ran: CodeThatRan | None = None
        self.asks_identity = True

    def begins(self, code: CodeType) -> None:
        """Come by what code may read that is about to run for the first time."""
        if runs_unseen(code):
            self._walk.follow_all()
        else:
            self._walk.begins(code)

    @property
    def ran_alone(self) -> CodeThatRan | None:
        """The code that this is the state of; None: all code."""
        return self._walk.ran

    @property
    def places(self) -> list[Place | Hidden]:
        """The places that are compared."""
        self._take_over()
        return self._places

    @property
    def watched(self) -> list[Absent]:
        """Namespaces, with the names that must not appear in them."""
        self._take_over()
        return self._watched

    @property
    def of_tensors(self) -> set[str]:
        """Names that code may load of a tensor, as it does where a user has set them."""
        self._take_over()
        return self._of_tensors

    @property
    def stores(self) -> dict[str, str]:
        """Names of attributes that code sets, with the first ``file:line`` that does."""
        return self._found.stores

    @property
    def streams(self) -> list[Stream]:
        """The user's own generators of random numbers."""
        return self._found.streams

    @property
    def work(self) -> tuple[int, int]:
        """How many functions were read, and places found."""
        return self._found.functions, len(self._found.places)

    def _take_over(self) -> None:
        """All that the walk has come by, without what is left out."""
        if self._size == self._walk.size:
            return
        self._size, self._test = self._walk.size, None
        walks = self._walk, *self._behind
        found = {_key_of(one): one for walk in reversed(walks) for one in walk.all_places()}
        self._places = [one for key, one in found.items() if key not in self._gone]
        self._places += self._added
        self._of_tensors = set[str]().union(*(walk.of_tensors() for walk in walks))
        gone_from: dict[int, set[Any]] = {}
        for holder, name in self._gone:
            gone_from.setdefault(holder, set()).add(name)
        self._watched = [
            (text, space, names - gone_from[id(space)] if id(space) in gone_from else names)
            for text, space, names in chain.from_iterable(walk.absent() for walk in walks)
        ]

    def reads(self, space: dict[str, Any], name: str) -> bool:
        """Whether code may load that name of the instance whose ``__dict__`` this is."""
        self._take_over()
        return name in self._found.reads.get(id(space), ()) or name in self._found.texts

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
        return getattr(self._found.kinds.get(id(space)), name, MISSING)

    def writer(self, place: Place | Hidden | Stream, *, in_backward: bool = False) -> Writer:
        """Who has changed a place while `ran` was noted.

        Parameters
        ----------
        in_backward : which may run hooks in a thread of its own.
        """
        ran = self.ran
        if ran is None or not ran.is_all or (in_backward and ran.may_run_in_backward()):
            return Writer.FORWARD
        return writer_of(place, ran)

    def restore(self) -> None:
        """Put all places back, empty caches that were filled, and remove what appeared.

        What another thread has written stays, and what a library has found out at its first call:
        caches of its own, which nobody sees, may rest on it. Tensors of the trace go.
        """
        for place in self.places:
            now = place.now()
            is_changed = not is_same(now, place.value)
            if is_changed and self.writer(place) is not Writer.FORWARD:
                continue
            if self._found.is_of_library(_holder(place)) and not (
                is_changed and holds_tensors(now)
            ):
                continue
            if isinstance(place, Contents) or not is_same_function(now, place.value):
                place.put(place.value)
        for _, space, names in self.watched:
            of_library = self._found.is_of_library(space)
            for name in space.keys() & names:
                if of_library and not holds_tensors(space[name]):
                    continue
                if self.writer(Entry(name, space, name, MISSING)) is Writer.FORWARD:
                    del space[name]
        for one in self.streams:
            one.put_back()
        for cache, before in self._found.caches:
            if cache.cache_info().currsize != before.currsize:
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
        gone = {_key_of(place) for place in places}
        if not gone <= self._gone:
            self._gone |= gone
            self._size = ()

    def compare_what_ran(self) -> None:
        """Compare what the code may read that ran since, and what a cache has kept of any code."""
        self._walk.go_on_with_what_ran()
        # At an earlier call the rest of such a function ran too.
        self._walk_behind(self._walk.behind_caches())

    def compare_as(self, other: PythonState) -> None:
        """Compare what the code may read that `other` compares."""
        self._walk_behind(other.behind_caches)

    def _walk_behind(self, functions: list[FunctionType]) -> None:
        self.behind_caches, self._size = functions, ()
        self._behind = [Walk(nn.Module(), functions)] if functions else []

    def compare_items_of(self, places: Iterable[Contents]) -> None:
        """Compare what these dictionaries hold, and nothing that they are given later."""
        grown = list(places)
        self.leave_out(grown)
        self.grown += grown
        self._added += [
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


def _key_of(place: Place | Hidden) -> tuple[int, Any]:
    """The same for two places that are one."""
    return id(_holder(place)), place.key if isinstance(place, (Entry, Slot)) else None


def _holder(place: Place | Hidden) -> Any:
    """The object that is a place as a whole, or has it."""
    if isinstance(place, Entry):
        # A class makes another view of its namespace at each look.
        return place.space if place.owner is None else place.owner
    if isinstance(place, ModuleHooks):
        return place.module._forward_hooks
    return place.cell if isinstance(place, Cell) else place.owner


@contextlib.contextmanager
def python_state_kept(
    model: nn.Module, loss_fn: Callable[..., Any] | None, ran: CodeThatRan | None = None
) -> Generator[PythonState]:
    """The state as it is now, which is put back on leaving."""
    state = PythonState(model, loss_fn, ran)
    try:
        yield state
    finally:
        state.restore()
