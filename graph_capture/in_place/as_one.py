"""Several nodes of a trace as one op: a tensor is made, and then written to in place.

The node of such an op has one argument a step, ``(args, kwargs)``: what the step is called with.
A text of `made_by` stands there for what an earlier step has made, as the code that fx writes of a
graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from remat.graph_capture.graph import JOINED
from remat.graph_capture.joint.nodes import target_name

MADE = "remat.made_by_step_"
STEP_METAS = "remat_step_metas"
"""On the meta of a node that runs several ops as one: the meta of the node behind each."""


@dataclass(frozen=True)
class JoinedOp:
    """One op, as the trace has it and as it runs.

    Attributes
    ----------
    op : of the trace, which writes to nothing.
    in_place : what runs instead, if that writes to the first argument.
    is_whole : nothing runs, as the first argument was written to already: it is the result.
    """

    op: Any
    in_place: Any = None
    is_whole: bool = False

    @property
    def is_view(self) -> bool:
        """Whether it only shows its first argument."""
        schema = getattr(self.op, "_schema", None)  # one of a list of views is picked without
        return schema is None or any(r.alias_info is not None for r in schema.returns)


@dataclass(frozen=True)
class AsOne:
    """The target of a node that runs several ops as one."""

    steps: tuple[JoinedOp, ...]

    def __call__(self, *calls: Any) -> Any:
        """Run each step, in place where it may be; the result of the last one."""
        return self.carried_out(calls, lambda _, step, args, kwargs: _carry_out(step, args, kwargs))

    def carried_out(
        self,
        calls: Sequence[Any],
        run: Callable[[int, JoinedOp, tuple[Any, ...], dict[str, Any]], Any],
    ) -> Any:
        """Have `run` carry out each step, given its index and its arguments; the last result."""
        made: list[Any] = []
        for i, (step, (args, kwargs)) in enumerate(zip(self.steps, calls, strict=True)):
            # What is written to, and a part of it, are arguments of their own, never in a list.
            given = tuple(made[int(a.removeprefix(MADE))] if _is_made(a) else a for a in args)
            made.append(run(i, step, given, dict(kwargs)))
        return made[-1]

    @property
    def __name__(self) -> str:
        """The names of its ops, but for views and for what only follows a write to a part."""
        named = (step.op for step in self.steps if not (step.is_view or step.is_whole))
        return JOINED.join(map(str, named))


def made_by(step: int) -> str:
    """What stands among arguments for the result of the step of that index."""
    return f"{MADE}{step}"


def _is_made(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith(MADE)


def ops_of(node: fx.Node) -> tuple[str, ...]:
    """The names of all ops of the node, views among them; most often it is one."""
    if isinstance(node.target, AsOne):
        return tuple(str(step.op) for step in node.target.steps)
    return (target_name(node),)


def calls_of(node: fx.Node) -> tuple[Any, ...]:
    """What each of `ops_of` is called with."""
    return node.args if isinstance(node.target, AsOne) else ((node.args, node.kwargs),)


def _carry_out(step: JoinedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if step.is_whole else (step.in_place or step.op)(*args, **kwargs)


def join(members: Sequence[fx.Node], steps: Sequence[JoinedOp]) -> None:
    """Let the last of `members` do what all of them do, and erase the others.

    Parameters
    ----------
    members : in the order of the graph. Nothing else reads any of them but the last.
    steps : what each of them does.
    """
    index = {node: i for i, node in enumerate(members)}
    *others, last = members

    def given(node: fx.Node) -> tuple[Any, Any]:
        call = tuple(node.args), tuple(node.kwargs.items())
        return pytree.tree_map_only(
            fx.Node, lambda one: made_by(index[one]) if one in index else one, call
        )

    calls = tuple(map(given, members))
    last.meta[STEP_METAS] = [dict(node.meta) for node in members]
    last.target, last.args, last.kwargs = AsOne(tuple(steps)), calls, {}
    for node in reversed(others):
        node.graph.erase_node(node)
