"""The module users train: their own, with a training step that follows the schedule."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.distributed.collectives import is_in_flight, wait_all
from remat.graph_capture.distributed.dtensors import is_sharded_by_fsdp
from remat.graph_capture.distributed.sharding import Sharding
from remat.graph_capture.errors import RewriteError, StateChangedError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.tracing.attribute_writes import state_guarded
from remat.graph_capture.tracing.left_out import Outputs
from remat.graph_capture.tracing.recipe import Recipe
from remat.graph_capture.tracing.step_module import LossFunction, apply_loss
from remat.graph_capture.tracing.trace import trace_recipe
from remat.rewriter.checking.audit import Audit, Audits
from remat.rewriter.compiled import CompiledStep, compile_step, links_of
from remat.rewriter.graphs.backward_parts import (
    Running,
    SplitRun,
    StepSplit,
    in_gradient_order,
    is_order_noted,
    warn_of_own_order,
)
from remat.rewriter.graphs.updating import Updates
from remat.rewriter.guards.backward import BackwardGuards, refuse_checkpoint
from remat.rewriter.guards.forward import Guards, constants_of
from remat.rewriter.guards.live_state import RecomputeInputs
from remat.rewriter.guards.wrapper import ToldWrapper
from remat.rewriter.user_module.own_forward import (
    Unplanned,
    class_of_user,
    original_of_shell,
    replacement_of,
)
from remat.schedules.outcome import Check
from remat.schedules.plan import Prediction
from remat.schedules.schedule import Schedule


class SharedState:
    """Shares every parameter, buffer and attribute with the user's module, through one dict.

    Each instance has a class of its own, whose `original_module` is the user's. Reading a pickle
    traces anew, and refuses what another torch would trace otherwise.
    """

    training: bool
    original_module: ClassVar[nn.Module]
    _remat_original_module: ClassVar[nn.Module]
    _remat_loss_fn: ClassVar[LossFunction | None]
    _remat_outputs: ClassVar[Outputs | None] = None  # that training steps return; None for all
    _remat_unplanned: ClassVar[Unplanned]
    _remat_wrapper: ClassVar[ToldWrapper | None] = None  # by which it is to be wrapped

    def __init__(self) -> None:
        self.__dict__ = self._remat_original_module.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the user's forward takes, and ``target`` if a loss was captured.

        With a loss, a call in training returns ``loss_fn(output, target)``, the form of
        `torch.distributed.pipelining`. In eval mode, a call without a target returns the output.

        Raises
        ------
        RematError : the module, or the batch, is not as it was at capture; over a range, a size is
            out of it; of a cache, as `remat.rematerialize` for the first batch of a signature.
        """
        target = kwargs.pop("target", None) if self._remat_loss_fn is not None else None
        if self.training and torch.is_grad_enabled():
            if self._remat_wrapper is not None:
                self._remat_wrapper.require(self)  # pyright: ignore[reportArgumentType]
            return self._remat_train((args, kwargs, target))
        return self._remat_run_original(args, kwargs, target)

    def _remat_train(self, batch: Any) -> Any:
        """Run a training step by the plan for a batch, (args, kwargs, target)."""
        raise NotImplementedError

    @classmethod
    def _remat_last_used(cls) -> type[SharedState]:
        """The class of the rewritten module that ran last: this one, or one that it holds."""
        return cls

    def _remat_running(self, batch: Any) -> nn.Module:
        """The rewritten module that runs a batch, (args, kwargs, target): this one, or a part."""
        return self  # pyright: ignore[reportReturnType]

    @classmethod
    def _remat_run_original(cls, args: Any, kwargs: Any, target: Any) -> Any:
        output = cls._remat_original_module.forward(*args, **kwargs)
        result = output if target is None else apply_loss(cls._remat_loss_fn, output, target)
        if torch.is_grad_enabled():
            cls._remat_unplanned.evaluated(cls._remat_original_module, result)
        return result

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)  # pyright: ignore
        if isinstance(found, nn.Module):
            self._remat_note(name)
        return found

    def _remat_note(self, part: str) -> None:
        if not torch.is_grad_enabled():  # a part may be trained in its place, without the plan
            return
        forward, module = replacement_of(self), self  # pyright: ignore
        if forward is not None:
            self._remat_unplanned.replaced(module, forward)  # pyright: ignore
        elif self._remat_unplanned.is_open:
            self._remat_unplanned.taken_apart(module, part)  # pyright: ignore

    @classmethod
    def _remat_over(cls, model: nn.Module) -> Any:
        make, (_, *given) = cls._remat_recipe_to_pickle()
        return make(model, *given)

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function, and the arguments with which it makes the same elsewhere."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self._remat_over(copy.copy(self._remat_original_module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = self._remat_over(copy.deepcopy(self._remat_original_module, memo))
        made.__setstate__(copy.deepcopy(self._remat_unplanned, memo))
        return made

    def __setstate__(self, unplanned: Unplanned) -> None:
        type(self)._remat_unplanned = unplanned

    def __reduce__(self) -> tuple[Any, ...]:
        return *self._remat_recipe_to_pickle(), self._remat_unplanned

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return self.__reduce__()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RewriteError(
            "use DistributedDataParallel: DataParallel copies a module at each step, and a plan "
            "is for the parameters of one module"
        )


def tell_wrapper(
    model: nn.Module, sharding: Sharding, *, accumulates: bool, paths: Sequence[str] = ()
) -> None:
    """Compare what wraps a planned model, or its blocks at `paths`, with what the plan counts."""
    told = ToldWrapper(weakref.ref(model), sharding, accumulates, paths)
    for one in map(model.get_submodule, paths or ("",)):
        cast("type[SharedState]", type(one))._remat_wrapper = told


def original_of(model: nn.Module) -> nn.Module:
    """The module that a planned one was made of: a notebook cell may be run twice."""
    while isinstance(model, SharedState):
        if replacement_of(model) is not None:
            raise RewriteError(
                f"plan this {type(model).__name__} before its forward is replaced, as "
                "Accelerate's prepare does: the new forward calls the first plan"
            )
        if is_sharded_by_fsdp(model):
            raise RewriteError(
                f"plan this {type(model).__name__} before fully_shard: it is sharded, and already "
                "follows a plan"
            )
        model = model._remat_original_module
    # What is no module at all is refused later, by its name.
    return original_of_shell(model) if isinstance(model, nn.Module) else model  # pyright: ignore


class RematModule(SharedState, fx.GraphModule):
    """A GraphModule that shares every attribute with the user's module.

    An instance has the user's ``__dict__`` itself, so parameters, buffers, submodules, hooks, the
    training flag and names are the same objects. The compiled step, the schedule and the guards are
    attributes of a subclass of the user's class that is made for the one instance. In training mode
    with gradients enabled, a call runs the rewritten step; otherwise the user's own forward.
    """

    schedule: ClassVar[Schedule]  # what the step carries out
    _remat_schedule: ClassVar[Schedule]
    forward_module: ClassVar[fx.GraphModule]  # can be read, printed and iterated, as backward's
    backward_module: ClassVar[fx.GraphModule]
    audit: ClassVar[Audit | None]  # compares steps with the model's forward, or says why not
    _remat_compiled_step: ClassVar[CompiledStep]
    _remat_guards: ClassVar[Guards]
    _remat_recompute_inputs: ClassVar[RecomputeInputs | None]
    _remat_audit: ClassVar[Audit | None]
    _remat_audits: ClassVar[Audits]
    _remat_prediction: ClassVar[Prediction | None]
    _remat_costed: ClassVar[TrainingGraph | None]
    _remat_updates: ClassVar[Updates | None]
    _remat_split: ClassVar[StepSplit | None] = None
    _remat_check: ClassVar[Check | None] = None  # of a step beside eager's, where one was run

    def __new__(cls, *args: Any, **kwargs: Any) -> RematModule:
        return object.__new__(cls)  # `GraphModule.__new__` would make another class for it

    def no_update(self) -> contextlib.AbstractContextManager[None]:
        """Within it backwards add to ``.grad`` and update nothing: for all batches but the last.

        For a module whose parameters are updated during backward, with ``accumulate=True``.

        Raises
        ------
        PlanError : it does not update its parameters, or its plan has no room for gradients.
        """
        if self._remat_updates is None:
            raise RewriteError(
                "use remat.rematerialize(..., optimizer_in_backward=...): this "
                f"{self._remat_guards.kind} does not update its parameters during backward"
            )
        return self._remat_updates.held_back()

    def _remat_train(self, batch: Any) -> Any:
        if batch[2] is None and self._remat_guards.takes_target:
            raise RewriteError(
                "call it with target=..., as captured: the loss is part of the rewritten "
                f"{self._remat_guards.kind} and takes a target"
            )
        return self._remat_step(batch)

    def _remat_step(self, batch: Any) -> Any:
        self._remat_unplanned.plan_runs()
        guards, step, audit = self._remat_guards, self._remat_compiled_step, self._remat_audit
        state, leaves, batch = self._remat_checked(batch)
        seen = audit.begin(self, leaves) if audit else None
        used, batch, running = self._remat_routed(state, leaves, batch)
        with audit.running(seen) if audit else contextlib.nullcontext():
            output = step.results(*used, *batch)
        if step.mutated:
            output, tensors = output
            for one in step.mutated:
                one.put(guards.model.get_submodule(one.path), tensors[: one.tensors])
                tensors = tensors[one.tensors :]
        for one in step.initialised:  # what eager's forward sets at its first call alone
            one.put()
        if audit and seen and (names := audit.differing(self, seen, output)):
            raise audit.error(names)
        inputs = [*state, *leaves]
        BackwardGuards(
            guards.model, guards.input_names, inputs, step.gradients, guards.read_in_backward,
            running, guards.unsharded_parameters, self._remat_recompute_inputs,
        ).watch(output)  # fmt: skip
        return output

    def _remat_checked(self, batch: Any) -> tuple[list[Tensor], list[Any], Any]:
        """The state that the step takes, the leaves of `batch`, and `batch`; or an error."""
        guards, step = self._remat_guards, self._remat_compiled_step
        guards.unsharded_parameters.require_fresh(self)
        state, leaves = guards.require(batch)
        if any(map(is_in_flight, leaves)):
            leaves = wait_all(leaves)  # a collective may still write to these
            batch = guards.batches.tree(leaves)
        if step.floats and (unlike := step.floats.refresh()):
            raise StateChangedError(unlike)
        refuse_checkpoint(guards.model, step.gradients)
        if step.tier:
            step.tier.require_room()
        return state, leaves, batch

    def _remat_routed(
        self, state: list[Tensor], leaves: list[Any], batch: Any
    ) -> tuple[list[Tensor], Any, Running | SplitRun | None]:
        """State and batch for the compiled step, on the ways by which gradients come back."""
        step, updates = self._remat_compiled_step, self._remat_updates
        # AOTAutograd would give these zeros, where eager sets no gradient.
        used = [t.detach() if i in step.gradients.unused else t for i, t in enumerate(state)]
        if is_order_noted():  # DDP orders its buckets by this step
            if step.gradient_gates:
                warn_of_own_order(self._remat_guards.kind)
            else:
                used = in_gradient_order(used, step.gradient_order)
        if self._remat_split:
            used, running = self._remat_split.begin(state, used)
            return used, batch, running
        if not step.gradient_gates:
            return used, batch, None
        if updates:
            updates.require_forward()
        passed, running = step.gradient_gates.through_gates([*used, *leaves], updates)
        return passed[: len(used)], self._remat_guards.batches.tree(passed[len(used) :]), running

    @classmethod
    def _remat_over(cls, model: nn.Module) -> RematModule:
        guards = cls._remat_guards
        is_own = guards.initialised or cls._remat_compiled_step.floats
        # A copy shares the compiled step, which takes all state as arguments. Not where graphs hold
        # the model's tensors, Python state changed, or steps set what no path finds.
        if guards.constants or is_own or guards.python_state.first_change():
            return super()._remat_over(model)
        recipe, step = guards.recipe, cls._remat_compiled_step
        state = state_guarded(model, recipe.loss_fn, step.mutated, guards.python_state)
        return make_module(
            model, cls._remat_schedule, recipe, step, state, cls._remat_prediction,
            cls._remat_costed, audit=cls._remat_audits,
        )  # fmt: skip

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        guards = cls._remat_guards
        return _restored, (
            cls._remat_original_module, cls._remat_schedule, guards.recipe, guards.captured_modes,
            cls._remat_prediction, cls._remat_costed, cls._remat_compiled_step.by_inductor,
            cls._remat_audits,
        )  # fmt: skip

    @property
    def graph(self) -> fx.Graph:
        """The forward graph, read-only. The other one is in `backward_module`."""
        return self._remat_compiled_step.forward.graph

    @graph.setter
    def graph(self, g: fx.Graph) -> NoReturn:
        raise RewriteError(
            "make another schedule and rewrite again: the graphs of a rewritten module carry out "
            "its schedule, and cannot be replaced"
        )

    @property
    def code(self) -> str:
        step = self._remat_compiled_step
        return f"# forward{step.forward.code}\n# backward{step.backward.code}"

    def recompile(self) -> NoReturn:
        """Refused: see `graph`."""
        raise RewriteError(
            "make another schedule and rewrite again: a rewritten module is not recompiled"
        )

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        step = self._remat_compiled_step
        graphs = step.forward, step.backward
        return "\n".join(one.print_readable(print_output, *args, **kwargs) for one in graphs)

    def __str__(self) -> str:
        return f"{nn.Module.__repr__(self)}\n{self.code}"

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)


def make_module(
    model: nn.Module, schedule: Schedule, recipe: Recipe, step: CompiledStep,
    python_state: PythonState, prediction: Prediction | None = None,
    costed: TrainingGraph | None = None, updates: Updates | None = None, *, audit: Audits = "step",
) -> RematModule:  # fmt: skip
    guards = Guards(
        model, recipe, python_state, step.initialised, step.forward, step.backward,
        tuple(step.gradients.written),
    )  # fmt: skip
    audits = None if audit == "none" else Audit(guards, step, schedule, costed, audits=audit)
    recompute_inputs = None
    # FSDP2 frees parameters between forward and backward.
    if not is_sharded_by_fsdp(model) and (step.recompute_inputs or constants_of(step.backward)):
        step_us = prediction.time_us if prediction else 0.0
        recompute_inputs = RecomputeInputs(step.recompute_inputs, step_us)
    kind = class_of_user(
        RematModule, model, recipe.loss_fn, schedule=schedule, _remat_schedule=schedule,
        forward_module=step.forward, backward_module=step.backward,
        _remat_compiled_step=step, _remat_guards=guards,
        _remat_recompute_inputs=recompute_inputs,
        audit=None if audit == "first" else audits, _remat_audit=audits, _remat_audits=audit,
        _remat_prediction=prediction, _remat_costed=costed, _remat_updates=updates,
        _remat_outputs=recipe.outputs,
    )  # fmt: skip
    return kind()


def _restored(
    model: nn.Module, schedule: Schedule, recipe: Recipe, modes: dict[str, bool],
    prediction: Prediction | None, costed: TrainingGraph | None, by_inductor: bool = False,
    audit: Audits = "step",
) -> RematModule:  # fmt: skip
    """The module of a plan over a copy of its model, whose modules were in `modes`, traced anew."""
    with in_modes(model, modes):  # the copy may be in eval mode, and stays so
        traced = trace_recipe(model, recipe)
        links = links_of(traced, costed)
        step = compile_step(traced, schedule, by_inductor=by_inductor, links=links)
        known = (prediction, costed)  # no updates: no optimizer knows a copy's parameters
        return make_module(model, schedule, recipe, step, traced.python_state, *known, audit=audit)


@contextlib.contextmanager
def in_modes(model: nn.Module, modes: dict[str, bool]) -> Generator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        for path, module in model.named_modules():
            module.training = modes.get(path, module.training)
        yield
    finally:
        for module, mode in before:
            module.training = mode
