"""Whether a model is made of the very objects that were looked at, with the same facts: quickly.

A step that has passed all guards is followed by one that has the same modules, parameters and
buffers in the same places. Then a few comparisons of many objects at once take the place of the
guards of them, which would take longer than a hundred small ops. Where it is not true, the guards
look closely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from remat.graph_capture.python_state.compiled_test import ObjectNames
from remat.graph_capture.python_state.guard_tree import same_facts
from remat.graph_capture.python_state.watched_dicts import Watched, WatchedDicts

_TABLES = ("_parameters", "_buffers", "_modules")


def same_objects(
    model: nn.Module,
    state: Sequence[Tensor],
    modes: Sequence[tuple[str, nn.Module, bool]],
    hooks: Sequence[tuple[str, nn.Module, str, dict[Any, Any]]],
) -> Callable[[], bool]:
    """A function that is true while all is as it is now.

    Parameters
    ----------
    state : parameters and buffers of the model. modes, hooks : as of `Guards`; no hooks are there.
    """
    if not all(_is_plain(tensor) for tensor in state):
        return lambda: False  # what C++ compares is made for plain tensors
    names = ObjectNames()
    tables = [getattr(m, name) for m in model.modules() for name in _TABLES]
    empty = tuple(table for table in tables if not table)
    empty += tuple(registered for _, _, _, registered in hooks)
    watched = [*_namespaces(model, modes, names), *_filled(tables, names)]
    places, facts = (
        WatchedDicts(watched, names),
        same_facts(list({id(t): t for t in state}.values())),
    )
    return lambda: not any(empty) and places.hold() and facts()


def _namespaces(
    model: nn.Module, modes: Sequence[tuple[str, nn.Module, bool]], names: ObjectNames
) -> list[Watched]:
    """Each module's own, with its tables and its mode."""
    of_mode = {id(module): mode for _, module, mode in modes}
    watched: list[Watched] = []
    for module in model.modules():
        own = vars(module)
        terms = [f"{names(own)}[{name!r}] is {names(getattr(module, name))}" for name in _TABLES]
        if id(module) in of_mode:
            terms.append(f"{names(own)}['training'] is {of_mode[id(module)]}")
        watched.append((own, terms))
    return watched


def _filled(tables: Sequence[dict[str, Any]], names: ObjectNames) -> list[Watched]:
    """The tables that are not empty, with all that is in them."""
    return [
        (
            table,
            [f"len({names(table)}) == {len(table)}"]
            + [f"{names(table)}[{names(key)}] is {names(item)}" for key, item in table.items()],
        )
        for table in tables
        if table
    ]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
