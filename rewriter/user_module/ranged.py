"""The module of a family of schedules: the size of each batch picks the step that runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import nn

from remat.graph_capture.errors import RewriteError, SignatureError
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Sizes
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.trace import Trace, trace_recipe
from remat.rewriter.checking.audit import Audit, Audits
from remat.rewriter.compiled import compile_step, copy_to_compile
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.guards.forward import BatchFlattener
from remat.rewriter.user_module.module import RematModule, SharedState, in_modes, make_module
from remat.rewriter.user_module.own_forward import class_of_user
from remat.schedules.family import Family, resized_schedule


class _Code(Protocol):
    def at(self, sizes: Sizes) -> RematModule:
        """The module whose code is for these sizes."""
        ...


MakeCode = Callable[[nn.Module, Family, Trace, Updates | None, Audits], _Code]
"""From a model, a family and its trace to what has code for each size."""


class _Members:
    """The rewritten modules of a family, each compiled when a batch first needs it."""

    def __init__(
        self, model: nn.Module, family: Family, traced: Trace, first: int,
        updates: Updates | None, audit: Audits, code: MakeCode | None,
    ) -> None:  # fmt: skip
        signature = traced.recipe.signature
        if not isinstance(signature, RangedSignature):
            raise RewriteError(
                "capture with dynamic=...: this trace is of one size, and a family of schedules "
                "is for a range"
            )
        self.model, self.family, self.traced = model, family, traced
        self.audit: Audits = audit
        self.updates = updates
        self.signature, self.batches = signature, BatchFlattener(signature)
        self._pick = family.compiled_pick()
        self._modules: list[RematModule | None] = [None] * len(family.members)
        self.first = self.last = self._modules[first] = self._compiled(first)
        self.make_code = code
        self.code = code(model, family, traced, updates, audit) if code else None

    def running(self, batch: Any) -> RematModule:
        """The module whose sizes a batch has; for a batch of other facts, one that refuses it."""
        leaves, spec = self.batches.leaves(batch)
        number = self._number(leaves) if spec == self.signature.spec else -1
        if number < 0:
            return self.first  # its guards name the difference
        if self.code is not None:
            self.first._remat_guards.require(batch)
            self.last = self.code.at(self.signature.sizes_of(leaves))
            return self.last
        if (found := self._modules[number]) is None:
            self.first._remat_guards.require(batch)  # a later one relies on what the first is for
            found = self._modules[number] = self._compiled(number)
        self.last = found
        return found

    def hold(self, batch: Any) -> bool:
        return self.signature.holds(*self.batches.leaves(batch))

    def _number(self, leaves: list[Any]) -> int:
        try:
            return self._pick(*self.signature.sizes_of(leaves).values())
        except (SignatureError, IndexError):
            return -1

    def _compiled(self, number: int) -> RematModule:
        traced = copy_to_compile(self.traced)  # compiling uses up a trace's metadata
        schedule = resized_schedule(self.family.members[number].schedule, traced.graph)
        step, state = compile_step(traced, schedule), traced.python_state
        return make_module(
            self.model, schedule, traced.recipe, step, state, updates=self.updates, audit=self.audit
        )


class RangedModule(SharedState, nn.Module):
    """A module that trains as the user's at every size of a range, with its ``__dict__`` itself."""

    family: ClassVar[Family]  # the schedules, and the sizes that each serves
    ranged_graph: ClassVar[RangedGraph | None]  # with its costs, if at hand
    _remat_family: ClassVar[Family]
    _remat_graph: ClassVar[RangedGraph | None]
    _remat_members: ClassVar[_Members]

    def _remat_train(self, batch: Any) -> Any:
        own = type(self)
        own._remat_unplanned.plan_runs()
        return own._remat_members.running(batch)._remat_train(batch)

    def no_update(self) -> contextlib.AbstractContextManager[None]:
        """As of the module for one size."""
        return type(self)._remat_members.last.no_update()

    @property
    def audit(self) -> Audit | None:
        """That of the schedule that ran last; each is audited by itself."""
        return type(self)._remat_members.last._remat_audit

    def _remat_running(self, batch: Any) -> nn.Module:
        return type(self)._remat_members.running(batch)

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        guards = cls._remat_members.first._remat_guards
        known = (cls._remat_family, cls._remat_graph)
        how = cls._remat_members.audit, cls._remat_members.make_code
        given = (*known, guards.recipe, guards.captured_modes, *how)
        return _restored_over_range, (cls._remat_original_module, *given)


def make_ranged(
    model: nn.Module, family: Family, traced: Trace, graph: RangedGraph | None = None,
    first: int | None = None, updates: Updates | None = None, *, audit: Audits = "step",
    code: MakeCode | None = None,
) -> RangedModule:  # fmt: skip
    """A `RangedModule` over `model`; the member `first` is compiled now, by default the last.

    With `code`, that of each size runs in place of eager's ops.
    """
    number = len(family.members) - 1 if first is None else first
    kind = class_of_user(
        RangedModule, model, traced.recipe.loss_fn, family=family, ranged_graph=graph,
        _remat_family=family, _remat_graph=graph,
        _remat_members=_Members(model, family, traced, number, updates, audit, code),
    )  # fmt: skip
    return kind()


def _restored_over_range(
    model: nn.Module, family: Family, graph: RangedGraph | None, recipe: Recipe,
    modes: dict[str, bool], audit: Audits = "step", code: MakeCode | None = None,
) -> RangedModule:  # fmt: skip
    with in_modes(model, modes):
        traced = trace_recipe(model, recipe)
        return make_ranged(model, family, traced, graph, audit=audit, code=code)
