"""Whether a model is made of the very objects that were looked at, with the same facts: quickly.

A step that has passed all guards is followed by one that has the same modules, parameters and
buffers in the same places. Then one compiled expression takes the place of the guards of them,
which would take longer than a hundred small ops. Where it is not true, the guards look closely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from remat.graph_capture.python_state.compiled_test import ObjectNames, compiled_test

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
    names = ObjectNames()
    tables = [(vars(m), name, getattr(m, name)) for m in model.modules() for name in _TABLES]
    empty = tuple(table for _, _, table in tables if not table)
    no_hooks = tuple(registered for _, _, _, registered in hooks)
    terms = [f"not any({names(empty)})", f"not any({names(no_hooks)})"]
    terms += [f"{names(own)}[{name!r}] is {names(table)}" for own, name, table in tables]
    for table in (table for _, _, table in tables if table):
        terms.append(f"len({names(table)}) == {len(table)}")
        terms += [f"{names(table)}[{names(key)}] is {names(item)}" for key, item in table.items()]
    terms += [f"{names(vars(m))}['training'] is {mode}" for _, m, mode in modes]
    terms += _same_facts(state, names)
    return compiled_test(terms, names)


def _same_facts(state: Sequence[Tensor], names: ObjectNames) -> Iterator[str]:
    """By dynamo's guards, which compare in C++; a tensor that they are not made for, here."""
    known = list({id(t): t for t in state if _is_plain(t)}.values())
    if known:
        # A list for each tensor, unlike what torch's stub says.
        sizes: Any = [list(t.shape) for t in known]
        strides: Any = [list(t.stride()) for t in known]
        guards = TensorGuards(*known, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        yield f"{names(guards.check)}(*{names(tuple(known))})"
    for tensor in state:
        if not _is_plain(tensor):
            yield "False"


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
