"""Dictionaries of libraries that forward only adds to: what a first call finds out is kept there.

einops keeps which backend is meant for which type of tensor. The types that tensors have while
they are traced come to no step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from remat.graph_capture.python_state.places import MISSING, Contents, is_same
from remat.graph_capture.python_state.reached import CLASSES_OF_A_TRACE, is_installed
from remat.graph_capture.python_state.watch import Change


@dataclass(frozen=True)
class Memo:
    """A dictionary that forward has added to.

    Attributes
    ----------
    place : with what it held before. value : what it holds now. added : to find at the next call.
    """

    place: Contents
    value: dict[Any, Any]
    added: dict[Any, Any]

    def put(self) -> None:
        """Let it hold what forward has added."""
        self.place.put(self.value)


def added_to_library(change: Change) -> Memo | None:
    """What forward has added to a global dictionary of an installed module; None if it did not.

    Each is an object of a class that was installed. What is kept for types of tensors that only a
    trace has is left out.
    """
    place = change.place
    if not (isinstance(place, Contents) and isinstance(change.before, dict)):
        return None
    before, now = cast("dict[Any, Any]", change.before), cast("dict[Any, Any]", change.now)
    if not all(is_same(now.get(key, MISSING), value) for key, value in before.items()):
        return None
    added = {key: now[key] for key in now if key not in before}
    if not (_is_global_of_library(place.owner) and all(map(_is_of_library, added.values()))):
        return None
    kept = {key: value for key, value in added.items() if key not in CLASSES_OF_A_TRACE}
    return Memo(place, now, kept)


def _is_global_of_library(owner: Any) -> bool:
    installed = [module for module in list(sys.modules.values()) if is_installed(module)]
    return any(owner is value for module in installed for value in list(vars(module).values()))


def _is_of_library(value: Any) -> bool:
    """Whether it is an object of a class that was installed, and so is not the user's."""
    module = sys.modules.get(type(value).__module__)
    return not isinstance(value, Tensor) and module is not None and is_installed(module)
