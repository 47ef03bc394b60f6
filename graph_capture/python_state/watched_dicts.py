"""Whether dictionaries hold what they held: by their versions, where these stand still."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch._C._dynamo.guards import dict_version

from remat.graph_capture.python_state.compiled_test import ObjectNames, compiled_test
from remat.graph_capture.python_state.guard_tree import unwritten, versions_tell

Watched = tuple[dict[Any, Any], list[str]]
"""A dictionary, and the terms that are true while it holds what it holds now."""

CALLS_A_TREE = 64
"""A tree of versions takes as long to make as so many comparisons of terms."""


class WatchedDicts:
    """Dictionaries that are compared with what they hold when this is made.

    A write gives a dictionary another version, also where it puts back what was there: then the
    terms decide, and the versions are taken anew. One that each step writes to, as for a loss that
    a layer leaves in an attribute, is compared by its terms from then on.

    Parameters
    ----------
    watched : the dictionaries and their terms. names : the objects of the terms.
    """

    def __init__(self, watched: Sequence[Watched], names: ObjectNames) -> None:
        self._names, self._watched = names, watched
        self._still, self._restless = (watched, []) if versions_tell() else ([], watched)
        self._calls = self._trees = 0
        self._watch()

    def hold(self) -> bool:
        """Whether all hold the very objects that they held."""
        self._calls += 1
        if self._are_still():
            self._is_new = False
            return self._others_hold()
        if not self._all():
            return False
        if self._calls >= CALLS_A_TREE * (self._trees - 1):
            self._watch_again()
        return True

    @functools.cached_property
    def _all(self) -> Callable[[], bool]:
        """Made when the versions first are not enough: most models never need it."""
        return compiled_test(_terms(self._watched), self._names)

    def _watch(self) -> None:
        dictionaries = [one for one, _ in self._still]
        self._versions = list(map(dict_version, dictionaries))
        self._are_still = unwritten(dictionaries)
        self._others_hold = compiled_test(_terms(self._restless), self._names)
        self._is_new = True
        self._trees += 1

    def _watch_again(self) -> None:
        """By new versions; those that one step was enough to write to, no more."""
        if self._is_new:
            pairs = list(zip(self._still, self._versions, strict=True))
            moved = [one for one, version in pairs if dict_version(one[0]) != version]
            self._restless = [*self._restless, *moved]
            self._still = [one for one, version in pairs if dict_version(one[0]) == version]
        self._watch()


def _terms(watched: Iterable[Watched]) -> Iterable[str]:
    return (term for _, terms in watched for term in terms)
