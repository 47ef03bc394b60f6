"""The module of a family of schedules: the size of each batch picks the step that runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from torch import nn

from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.errors import RewriteError, SignatureError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.sizes.ranged_graph import RangedGraph
from remat.graph_capture.sizes.ranged_signature import RangedSignature
from remat.graph_capture.sizes.symbols import Sizes, Symbol
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.trace import trace_recipe
from remat.graph_capture.tracing.traced_step import Trace, with_edits
from remat.rewriter.checking.audit import Audit, Audits
from remat.rewriter.compiled import compile_step, copy_to_compile, edits_of, tier_for
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.guards.forward import BatchFlattener
from remat.rewriter.tiers.file_tier import TierCopies
from remat.rewriter.user_module.module import RematModule, SharedState, in_modes, make_module
from remat.rewriter.user_module.own_forward import class_of_user
from remat.schedules.family import Family, Member, resized_schedule
from remat.schedules.schedule import Schedule
from remat.schedules.simulate import simulate


class _Code(Protocol):
    def at(self, sizes: Sizes) -> RematModule:
        """The module whose code is for these sizes."""
        ...


MakeCode = Callable[[nn.Module, Family, Trace, RangedGraph | None, Updates | None, Audits], _Code]
"""From a model, a family and its trace to what has code for each size."""


class _Members:
    """The rewritten modules of a family, each compiled when a batch first needs it."""

    def __init__(
        self, model: nn.Module, family: Family, traced: Trace, graph: RangedGraph | None,
        first: int, updates: Updates | None, audit: Audits, made: Sequence[RematModule] = (),
        code: MakeCode | None = None,
    ) -> None:  # fmt: skip
        signature = traced.recipe.signature
        if not isinstance(signature, RangedSignature):
            raise RewriteError(
                "capture with dynamic=...: this trace is of one size, and a family of schedules "
                "is for a range"
            )
        self.model, self.family, self.traced, self.graph = model, family, traced, graph
        self.audit: Audits = audit
        self.updates = updates
        self.signature, self.batches = signature, BatchFlattener(signature)
        self._pick = family.compiled_pick()
        self._modules: list[RematModule | None] = [*made] or [None] * len(family.members)
        self.first = self.last = self._modules[first] or self._compiled(first)
        self._modules[first] = self.first
        self.make_code = code
        self.code = code(model, family, traced, graph, updates, audit) if code else None

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
        member = self.family.members[number]
        # Compiling uses up a trace's metadata.
        traced = copy_to_compile(self.traced)
        traced, schedule = as_planned_over(self.model, traced, member.schedule)
        bounding, tier = self._bounding(member), self._tiers[number]
        links = None if bounding is None else bounding.links
        step = compile_step(traced, schedule, links=links, tier=tier)
        state = traced.python_state
        # Without the whole step's graph nobody knows whether it has room beside one in chunks.
        audit = "none" if self.graph is None and schedule.chunks else self.audit
        module = make_module(
            self.model, schedule, traced.recipe, step, state, updates=self.updates, audit=audit
        )
        if bounding is not None and (audits := type(module)._remat_audit) is not None:
            audits.judge_room_by(resized_schedule(member.schedule, bounding), bounding)
        return module

    @functools.cached_property
    def _tiers(self) -> list[TierCopies | None]:
        """Of each schedule. On a CUDA device they share pinned memory: one runs at a time."""
        members = self.family.members
        pairs = [(self._bounding(one), one.schedule) for one in members]
        tiers = [None if at is None else tier_at_most(at, schedule) for at, schedule in pairs]
        if is_cuda(self.traced.recipe.device) and any(tiers):
            from remat.rewriter.tiers.stream_tier import share_memory

            share_memory([one for one in tiers if one is not None])
        return tiers

    def _bounding(self, member: Member) -> TrainingGraph | None:
        """The step at the largest sizes that a member serves."""
        if self.graph is None:
            return None
        most = max(member.corners, key=lambda one: math.prod(one.values()))
        part = (Symbol(s.name, s.low, most[s.name], s.multiple) for s in self.graph.symbols)
        return self.graph.bounding(tuple(part))


def tier_at_most(largest: TrainingGraph, schedule: Schedule) -> TierCopies | None:
    """Where `schedule` copies to, with room for the largest sizes; None if it copies nothing."""
    if not schedule.moves:
        return None
    resized = resized_schedule(schedule, largest)
    return tier_for(largest, resized, largest.links, simulate(largest, resized))


def as_planned_over(
    model: nn.Module, traced: Trace, schedule: Schedule
) -> tuple[Trace, Schedule]:  # fmt: skip
    """The trace of a range as `schedule` runs it, which may be in chunks, and `schedule` at the
    sizes that were traced with; `traced` is used up."""
    if not (edits := tuple(edits_of(schedule))):
        return traced, resized_schedule(schedule, traced.graph)
    captured_hash = traced.graph.hash
    if traced.floats:  # they were found in the captured graph
        edited = trace_recipe(model, dataclasses.replace(traced.recipe, edits=edits))
    else:
        edited = with_edits(traced, edits)
    resized = resized_schedule(schedule, edited.graph)
    return edited, msgspec.structs.replace(resized, captured_hash=captured_hash)


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
        guards, recipe = cls._remat_members.first._remat_guards, cls._remat_members.traced.recipe
        known = (cls._remat_family, cls._remat_graph)
        how = cls._remat_members.audit, cls._remat_members.make_code
        given = (*known, recipe, guards.captured_modes, *how)
        return _restored_over_range, (cls._remat_original_module, *given)


def make_ranged(
    model: nn.Module, family: Family, traced: Trace, graph: RangedGraph | None = None,
    first: int | None = None, updates: Updates | None = None, *, audit: Audits = "step",
    made: Sequence[RematModule] = (), code: MakeCode | None = None,
) -> RangedModule:  # fmt: skip
    """A `RangedModule` over `model`; the member `first` is compiled now, by default the last.
    `made`: all members, where they are there. With `code`, that of each size runs in place of
    eager's ops."""
    number = len(family.members) - 1 if first is None else first
    kind = class_of_user(
        RangedModule, model, traced.recipe.loss_fn, family=family, ranged_graph=graph,
        _remat_family=family, _remat_graph=graph,
        _remat_members=_Members(
            model, family, traced, graph, number, updates, audit, made, code
        ),
    )  # fmt: skip
    return kind()


def _restored_over_range(
    model: nn.Module, family: Family, graph: RangedGraph | None, recipe: Recipe,
    modes: dict[str, bool], audit: Audits = "step", code: MakeCode | None = None,
) -> RangedModule:  # fmt: skip
    with in_modes(model, modes):
        traced = trace_recipe(model, recipe)
        return make_ranged(model, family, traced, graph, audit=audit, code=code)
