"""Compares the places of a walk with what they were, all at once."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, cast

from torch import Tensor, nn

from remat.graph_capture.python_state.executed_code import ExecutedCode, runs_unseen
from remat.graph_capture.python_state.module_hooks import ModuleHooks
from remat.graph_capture.python_state.reachable_objects import (
    CLASSES_OF_A_TRACE,
    Absent,
    holds_tensors,
    is_installed,
)
from remat.graph_capture.python_state.state_slots import (
    MISSING,
    ClosureCell,
    ContainerItems,
    DictItem,
    OpaqueState,
    SlotAttr,
    StateSlot,
    Stream,
    is_same,
    is_same_function,
    stream,
)
from remat.graph_capture.python_state.state_walk import StateWalk
from remat.graph_capture.python_state.tensor_attributes import Writer, writer_of
from remat.graph_capture.torch_private.aot import (
    GuardManager,
    GuardManagerType,
    RootGuardManager,
    dict_version,
)
from remat.graph_capture.torch_private.core import dispatch_keys

_TERMS_PER_PART = 200  # in one expression: the compiler's stack is not made for one of 10,000


class ObjectNames:
    """Gives each object a variable name in the namespace of the compiled check."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def __call__(self, value: Any) -> str:
        name = self._known.setdefault(id(value), f"v{len(self._known)}")
        self.space[name] = value  # kept alive here, so that no other object gets its id
        return name


def _compiled_check(terms: Iterable[str], names: ObjectNames) -> Callable[[], bool]:
    """One function that is true while every term, an expression of `names`, is."""
    terms = list(terms)
    parts = [terms[i : i + _TERMS_PER_PART] for i in range(0, len(terms), _TERMS_PER_PART)]
    lines = [f"    if not ({' and '.join(part)}): return False" for part in parts]
    # As one function, Python runs each of many small comparisons in some tens of nanoseconds.
    exec("\n".join(["def test():", *lines, "    return True"]), names.space)
    return names.space["test"]


# Private guards of dynamo's compare many objects in one call into C++: 10 ns a dictionary, 40 ns a
# tensor; in Python one entry takes 20 ns. Tests run them on each supported release.

_PART = 64  # objects below one node of the tree. To add one, torch looks at all that are there.


def unwritten(dictionaries: Sequence[dict[Any, Any]]) -> Callable[[], bool]:
    """A check that holds while nothing is written to any of the dictionaries."""

    def add(node: GuardManager, dictionary: dict[Any, Any]) -> None:
        # A write that puts back what was there counts too: False may be wrong, True never is.
        node.add_dict_version_guard(dictionary, [""], None)

    return _tree(dictionaries, add)


def same_facts(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A check of type, dtype, device, shape, strides, and whether they require a gradient."""

    def add(node: GuardManager, tensor: Tensor) -> None:
        sizes: Any = list(tensor.shape)  # lists of numbers, unlike what torch's stub says
        strides: Any = list(tensor.stride())
        keys = dispatch_keys(tensor)
        node.add_tensor_match_guard(tensor, sizes, strides, "", [""], None, type(tensor), keys)

    return _tree(tensors, add)


def _tree(objects: Sequence[Any], add: Callable[[GuardManager, Any], None]) -> Callable[[], bool]:
    parts = tuple(tuple(objects[i : i + _PART]) for i in range(0, len(objects), _PART))
    root = RootGuardManager()
    for part, node in _nodes_below(root, parts):
        for one, leaf in _nodes_below(node, part):
            add(leaf, one)
    return functools.partial(root.check, parts)


def _nodes_below(node: GuardManager, values: tuple[Any, ...]) -> list[tuple[Any, GuardManager]]:
    kind: Any = GuardManagerType.GUARD_MANAGER
    return [(one, node.tuple_getitem_manager(i, "", one, kind)) for i, one in enumerate(values)]


@functools.cache
def versions_tell() -> bool:
    """Whether this Python tells of each write to a dictionary."""
    tried: dict[str, Any] = {"key": None}  # tried, as it is not documented
    same = unwritten([tried])
    before = same()
    tried["key"] = same
    return before and not same()


Watched = tuple[dict[Any, Any], list[str]]  # the dictionary, and what is true while it holds this

_LOOKS_A_TEST = 32  # a test takes as long to compile as so many looks at all places
CALLS_A_TREE = 64  # a tree of versions takes as long to make as so many comparisons of terms


class WatchedDicts:
    """Dictionaries that are compared with what they hold when this is made."""

    def __init__(self, watched: Sequence[Watched], names: ObjectNames) -> None:
        self._names, self._watched = names, watched
        self._still, self._restless = (watched, []) if versions_tell() else ([], watched)
        self._calls = self._trees = 0
        self._watch()

    def hold(self) -> bool:
        self._calls += 1
        if self._are_still():
            self._is_new = False
            return self._others_hold()
        if not self._all():  # a write that changes nothing gives another version too
            return False
        if self._calls >= CALLS_A_TREE * (self._trees - 1):  # not more often than a new tree pays
            if self._is_new:  # then compared by its terms, as a loss in an attribute
                pairs = list(zip(self._still, self._versions, strict=True))
                moved = [one for one, version in pairs if dict_version(one[0]) != version]
                self._restless = [*self._restless, *moved]
                self._still = [one for one, version in pairs if dict_version(one[0]) == version]
            self._watch()
        return True

    @functools.cached_property
    def _all(self) -> Callable[[], bool]:
        return _compiled_check(_terms(self._watched), self._names)  # most models never need it

    def _watch(self) -> None:
        dictionaries = [one for one, _ in self._still]
        self._versions = list(map(dict_version, dictionaries))
        self._are_still = unwritten(dictionaries)
        self._others_hold = _compiled_check(_terms(self._restless), self._names)
        self._is_new = True
        self._trees += 1


def _terms(watched: Iterable[Watched]) -> Iterable[str]:
    return (term for _, terms in watched for term in terms)


@dataclass(frozen=True)
class Change:
    text: str
    before: Any
    now: Any
    place: StateSlot | OpaqueState | Stream


class PythonState:
    """Python's state that forward and the loss may read, as it is when this is made. `ran`: what
    this code may read, and what runs later; None: any code. `live`: not what this reads."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        ran: ExecutedCode | None = None,
        live: frozenset[CodeType] = frozenset(),
    ) -> None:
        self._walk = StateWalk(model, loss_fn, ran, live)
        self._found = self._walk.found
        self.grown: list[ContainerItems] = []
        self._gone: set[tuple[int, Any]] = set()
        self._added: list[StateSlot | OpaqueState] = []
        self.behind_caches: list[FunctionType] = []  # forward took their results out of a cache
        self._behind: list[StateWalk] = []
        self._size: tuple[int, ...] = ()
        self._test: Callable[[], bool] | None = None
        self._at_test: list[Change] = []  # what was changed when it was compiled
        self._looks_to_compile = 0
        self.ran: ExecutedCode | None = None  # since this was made, where it is noted
        self.asks_identity = True  # whether code may, as in ``query is key``

    def begins(self, code: CodeType) -> None:
        if runs_unseen(code):
            self._walk.follow_all()  # from now on code may run unseen, so all of it counts
        else:
            self._walk.begins(code)

    @property
    def code_in_scope(self) -> ExecutedCode | None:
        """None: all code."""
        return self._walk.ran

    @property
    def places(self) -> list[StateSlot | OpaqueState]:
        self._take_over()
        return self._places

    @property
    def watched(self) -> list[Absent]:
        """Namespaces, with the names that must not appear in them."""
        self._take_over()
        return self._watched

    @property
    def of_tensors(self) -> set[str]:
        self._take_over()
        return self._of_tensors

    @property
    def stores(self) -> dict[str, str]:
        """By name of an attribute, the first ``file:line`` that sets it."""
        return self._found.stores

    @property
    def streams(self) -> list[Stream]:
        return self._found.streams

    def _take_over(self) -> None:
        if self._size == self._walk.size:
            return
        self._size, self._test = self._walk.size, None
        walks = self._walk, *self._behind
        # In reverse, so that of two places that are one the first walk's stays.
        found = {_key_of(one): one for walk in reversed(walks) for one in walk.all_places()}
        self._places = [one for key, one in found.items() if key not in self._gone] + self._added
        self._of_tensors = set[str]().union(*(walk.of_tensors() for walk in walks))
        gone_from: dict[int, set[Any]] = {}
        for holder, name in self._gone:
            gone_from.setdefault(holder, set()).add(name)
        self._watched = [
            (text, space, names - gone_from[id(space)] if id(space) in gone_from else names)
            for text, space, names in chain.from_iterable(walk.absent() for walk in walks)
        ]

    def reads(self, space: dict[str, Any], name: str) -> bool:
        self._take_over()
        return name in self._found.reads.get(id(space), ()) or name in self._found.texts

    def changes(self) -> list[Change]:
        """Places that hold something else now, by value; and generators that have moved."""
        # Not in `first_change`: generators may move between steps.
        moved = [Change(one.text, "", "", one) for one in self.streams if one.has_moved()]
        return [*self._changed_places(), *self._appeared(), *moved]

    def since(self) -> dict[Any, Change]:
        """What holds something else now than when this was made, by place; but a library's caches,
        which nobody sees."""
        moved = [one for one in self.streams if one.has_moved()]
        found = self._changes_so_far()
        if not (moved or found):
            return {}
        seen = [c for c in found if holds_tensors(c.now) or not self._is_of_library(c.place)]
        at = [Change(one.text, "", one.now(), one) for one in moved]
        return {_key_of(change.place): change for change in (*seen, *at)}

    def _is_of_library(self, place: StateSlot | OpaqueState | Stream) -> bool:
        return self._found.is_of_library(_holder(place))

    def compares_any(self, changes: Iterable[Change]) -> bool:
        """Whether one of these, of another walk, is at a place that this compares."""
        places = {_key_of(one) for one in (*self.places, *self.streams)}
        places |= {(id(space), name) for _, space, names in self.watched for name in names}
        return any(_key_of(change.place) in places for change in changes)

    def _changed_places(self) -> Generator[Change]:
        for place in self.places:
            now = place.now()
            if not is_same(now, place.value):
                yield Change(place.text, place.value, now, place)

    def _appeared(self) -> Generator[Change]:
        for text, space, names in self.watched:
            for name in sorted(space.keys() & names):
                place = DictItem(f"{text}.{name}".lstrip("."), space, name, MISSING)
                # Before it had a value of its own, it had its class's.
                before = getattr(self._found.kinds.get(id(space)), name, MISSING)
                yield Change(place.text, before, space[name], place)

    def writer(self, at: StateSlot | OpaqueState | Stream, *, in_backward: bool = False) -> Writer:
        """Who has changed a place while `ran` was noted."""
        ran = self.ran
        # Backward may run hooks in a thread of its own.
        if ran is None or not ran.is_all or (in_backward and ran.may_run_in_backward()):
            return Writer.FORWARD
        return writer_of(at, ran)

    def restore(self) -> None:
        """Put all places back, empty caches that were filled, and remove what appeared."""
        for place in self.places:
            now = place.now()
            is_changed = not is_same(now, place.value)
            # What another thread has written stays.
            if is_changed and self.writer(place) is not Writer.FORWARD:
                continue
            of_trace = is_changed and holds_tensors(now)
            # So do caches of a library's first call, which nobody sees. Tensors of a trace go.
            if not of_trace and self._found.is_of_library(_holder(place)):
                continue
            if isinstance(place, ContainerItems) or not is_same_function(now, place.value):
                place.put(place.value)
        for _, space, names in self.watched:
            of_library = self._found.is_of_library(space)
            for name in space.keys() & names:
                is_kept = of_library and not holds_tensors(space[name])
                item = DictItem(name, space, name, MISSING)
                if not is_kept and self.writer(item) is Writer.FORWARD:
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

    def leave_out(self, places: Iterable[StateSlot | OpaqueState]) -> None:
        """Compare these no more: forward itself sets them."""
        if not (gone := {_key_of(place) for place in places}) <= self._gone:
            self._gone |= gone
            self._size = ()  # so that all is gathered anew at the next look

    def compare_executed(self) -> None:
        """Compare what the code may read that ran since, and what a cache has kept of any code."""
        self._walk.follow_executed()
        self._walk_behind(self._walk.behind_caches())  # an earlier call ran them wholly

    def compare_as(self, other: PythonState) -> None:
        """Compare what the code may read that `other` compares."""
        self._walk_behind(other.behind_caches)

    def _walk_behind(self, functions: list[FunctionType]) -> None:
        self.behind_caches, self._size = functions, ()
        # An empty model: only what these functions read counts.
        self._behind = [StateWalk(nn.Module(), functions)] if functions else []

    def compare_items_of(self, places: Iterable[ContainerItems]) -> None:
        """Compare what these dictionaries hold, and nothing that they are given later."""
        grown = list(places)
        self.leave_out(grown)
        self.grown += grown
        self._added += [
            DictItem(place.text, place.owner, key, value)
            for place in grown
            for key, value in place.value.items()
        ]

    def first_change(self) -> Change | None:
        """The first place that holds something else; fast where each holds the very same object."""
        if self._is_as_at_test():
            return next(iter(self._at_test), None)
        change = next(chain(self._changed_places(), self._appeared()), None)
        if change is None:
            self._compile([])  # other objects of equal values: the next test is for those
        return change

    def _changes_so_far(self) -> list[Change]:
        if self._is_as_at_test():
            return self._at_test
        found = [*self._changed_places(), *self._appeared()]
        self._looks_to_compile -= 1
        # Such as a context that is set while forward runs; of tensors, a test would keep the graph.
        if self._looks_to_compile < 0 and not any(holds_tensors(one.now) for one in found):
            self._compile(found)
        return found

    def _is_as_at_test(self) -> bool:
        # A name or attribute that is gone raises one of these.
        with contextlib.suppress(KeyError, ValueError, AttributeError):
            return self._test is not None and self._test()
        return False

    def _compile(self, changed: list[Change]) -> None:
        names, by_space, others = ObjectNames(), dict[int, Watched](), list[str]()
        for space, term in self._terms(names):
            if type(space) is dict:  # only a plain dictionary tells of writes by its version
                by_space.setdefault(id(space), (space, []))[1].append(term)
            else:
                others.append(term)
        entries, rest = WatchedDicts(list(by_space.values()), names), _compiled_check(others, names)
        self._test = lambda: entries.hold() and rest()
        self._at_test, self._looks_to_compile = changed, _LOOKS_A_TEST

    def _terms(self, names: ObjectNames) -> Generator[tuple[Any, str]]:
        """An expression for each place and each namespace, beside the mapping that it reads."""
        for place in self.places:
            space = place.space if isinstance(place, DictItem) else None
            yield space, replace(place, value=place.now()).term(names)
        for _, space, _ in self.watched:  # a name that appears makes it longer
            yield space, f"len({names(space)}) == {len(space)}"


def _key_of(place: StateSlot | OpaqueState | Stream) -> tuple[int, Any]:
    """The same for two places that are one."""
    return id(_holder(place)), place.key if isinstance(place, (DictItem, SlotAttr)) else None


def _holder(place: StateSlot | OpaqueState | Stream) -> Any:
    """The object that is a place as a whole, or has it."""
    if isinstance(place, DictItem):
        # A class makes another view of its namespace at each look.
        return place.space if place.owner is None else place.owner
    if isinstance(place, ModuleHooks):
        return place.module._forward_hooks
    return place.cell if isinstance(place, ClosureCell) else place.owner


@contextlib.contextmanager
def python_state_kept(
    model: nn.Module, loss_fn: Callable[..., Any] | None, ran: ExecutedCode | None = None,
    live: frozenset[CodeType] = frozenset(),
) -> Generator[PythonState]:  # fmt: skip
    with contextlib.ExitStack() as stack:
        state = PythonState(model, loss_fn, ran, live)
        stack.callback(state.restore)
        yield state


@dataclass(frozen=True)
class LibraryCache:
    """A global dictionary of a library that forward has added to at its first call."""

    place: ContainerItems  # with what it held before
    value: dict[Any, Any]  # what it holds now
    added: dict[Any, Any]  # to find at the next call

    def put(self) -> None:
        self.place.put(self.value)


def added_to_library(change: Change) -> LibraryCache | None:
    """What forward has added to a global dictionary of an installed module, or None."""
    place = change.place
    if not (isinstance(place, ContainerItems) and isinstance(change.before, dict)):
        return None
    before, now = cast("dict[Any, Any]", change.before), cast("dict[Any, Any]", change.now)
    if not all(is_same(now.get(key, MISSING), value) for key, value in before.items()):
        return None
    added = {key: now[key] for key in now if key not in before}  # such as einops's backends
    installed = [vars(module) for module in list(sys.modules.values()) if is_installed(module)]
    is_global = any(place.owner is value for space in installed for value in list(space.values()))
    if not is_global or not all(map(_is_of_library, added.values())):
        return None
    # Types of tensors that only a trace has come to no step.
    kept = {key: value for key, value in added.items() if key not in CLASSES_OF_A_TRACE}
    return LibraryCache(place, now, kept)


def _is_of_library(value: Any) -> bool:
    module = sys.modules.get(type(value).__module__)
    return not isinstance(value, Tensor) and module is not None and is_installed(module)
