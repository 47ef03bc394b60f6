"""Forward on the meta device: what it computes from data, and the values of all else.

Models ask their own numbers what to do: whether positions that they have counted are those of one
sequence, or a mask that they have made hides nothing. Such tensors are computed beside the meta
ones, so that forward takes the way it takes on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from remat.graph_capture.torch_private.core import OpWatcher, compiling_and_exporting, pytree

_MOST_ELEMENTS = 1 << 18
"""Of a tensor whose values are computed: a mask of 512 x 512."""
_LOOKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DataDependence:
    """What is computed from tensors of `data`, or drawn: from their contents, not their shapes."""

    def __init__(self, data: Iterable[Tensor]) -> None:
        # Held, so that no other tensor gets the id of one.
        self._known = {id(tensor): tensor for tensor in data}

    def note(self, read: Iterable[Tensor], made: Iterable[Tensor], *, is_drawn: bool) -> None:
        if is_drawn or any(id(tensor) in self._known for tensor in read):
            self._known.update((id(tensor), tensor) for tensor in made)

    def why_unsent(self, path: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        """Why ranks without the batch cannot run block `path`, given this beside its border."""
        named = {f"argument {i + 1}": leaf for i, leaf in enumerate(args)} | dict(kwargs)
        for name, given in named.items():
            if any(id(leaf) in self._known for leaf in pytree.tree_leaves(given)):
                return (
                    f"compute {name} in the blocks, or plan with --cp 1 and --pp 1: block {path} "
                    "gets it, computed from the batch, from parameters or from random numbers, "
                    "and other ranks have none of these"
                )
        return ""


class _KnownValues(OpWatcher):
    def __init__(self) -> None:
        super().__init__()
        # The meta tensors are held, so that no other gets the id of one. Values share memory as
        # they do, so what is written to one is in all that show it.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_known = all(id(t) in self._known for t in given) and _has_values(func)
        if is_known and _LOOKS & set(func.tags):
            values = self._values(func, args, kwargs)
            result = pytree.tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, values)
            self._keep(result, values)
            return result
        result = func(*args, **kwargs)
        if is_known and all(map(_is_small, pytree.tree_leaves(result))):
            self._keep(result, self._values(func, args, kwargs))
        elif func._schema.is_mutable:
            self._forget(given)
        return result

    def _values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*pytree.tree_map(self._value, args), **pytree.tree_map(self._value, kwargs))

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._known[id(leaf)][1]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _keep(self, result: Any, values: Any) -> None:
        pairs = zip(*map(pytree.tree_leaves, (result, values)), strict=True)
        self._known.update((id(t), (t, value)) for t, value in pairs if isinstance(t, Tensor))

    def _forget(self, written: list[Tensor]) -> None:
        """What shares memory with tensors whose values are no longer known."""
        gone = {t.untyped_storage()._cdata for t in written}
        self._known = {
            key: pair
            for key, pair in self._known.items()
            if pair[0].untyped_storage()._cdata not in gone
        }


def _has_values(func: Any) -> bool:
    """Whether its result has any, and the same each time."""
    is_empty = func._schema.name.partition("::")[2].startswith(("empty", "new_empty"))
    return not is_empty and torch.Tag.nondeterministic_seeded not in func.tags


def _is_small(result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_meta and result.numel() <= _MOST_ELEMENTS


@contextlib.contextmanager
def on_meta(looks_at_data: bool) -> Generator[None]:
    """Let forward run on the meta device. Code that looks at values of data leaves that out where
    it is compiled; so that is what it is told then."""
    with torch.device("meta"), compiling_and_exporting(looks_at_data, False), _KnownValues():
        yield
