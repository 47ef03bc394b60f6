"""A whole optimizer step that is called like a function, and what carries out its actions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.joint.build import Joint
from remat.graph_capture.joint.gradients import parameter_groups, step_of
from remat.graph_capture.torch_private.core import DisableAutocast
from remat.rewriter.graphs.codegen import Released, Steps, compile_in_steps, release_gradients
from remat.rewriter.graphs.copies import CopyContext, CopyEmitter, copy_times, written_by
from remat.rewriter.graphs.eager import EagerEmitter
from remat.rewriter.graphs.emit import leave_out_views
from remat.rewriter.graphs.emitter import Demanded, as_module
from remat.rewriter.guards.forward import Guards
from remat.rewriter.tiers.file_tier import TierCopies
from remat.schedules.schedule import Fetch, Offload, Schedule, Step
from remat.whole_step.op_writer import StepOfOps
from remat.whole_step.program import (
    Add,
    Gather,
    JointResults,
    Reduce,
    Resume,
    Segment,
    StepAction,
    StepOf,
)
from remat.whole_step.residents import Held, MemoryWatch, Residents, moments, uninterrupted
from remat.whole_step.shards import ShardedResidents


def _microbatch_code(
    joint: Joint, segments: Sequence[Segment], place_of: Mapping[str, int], tier: TierCopies
) -> Steps:
    """Compile the segments of a microbatch, all in one generator, which stops after each.

    `place_of` has, by parameter, the place of its gradient among all results of the joint graph.
    """
    steps = tuple(step for segment in segments for step in segment.steps)
    # As in a rewritten module, but without autograd: the joint graph contains backward.
    emitter = _emitter(joint, steps, tier)
    inputs = joint.module.graph.find_nodes(op="placeholder")
    emitter.take_inputs(inputs)
    results: Any = joint.module.graph.output_node().args[0]
    released, begun = dict[int, Any](), 0
    for segment in segments:
        emitter.carry_out(segment.steps, first=begun)
        begun += len(segment.steps)
        # Forward returns its results once, at its end.
        forward = range(joint.num_forward_outputs) if segment.ends_forward else ()
        places = (*forward, *(place_of[name] for name in segment.gradients))
        given = tuple(emitter.results(results[place] for place in places))
        emitter.graph.call_function(release_gradients, (places, given))
        released |= zip(places, given, strict=True)
    emitter.graph.output(tuple(released.get(place) for place in range(len(results))))
    leave_out_views(emitter.graph)
    return compile_in_steps(as_module(joint, emitter.graph))


def codes_of(
    joint: Joint, actions: Sequence[StepAction], place_of: Mapping[str, int], tier: TierCopies
) -> list[Steps]:
    segments = dict[int, list[Segment]]()
    for action in actions:
        if isinstance(action, Resume):
            segments.setdefault(action.microbatch, []).append(action.segment)
    known = dict[tuple[Segment, ...], Steps]()
    for i in sorted(segments):
        key = tuple(segments[i])
        if key not in known:  # equal microbatches share code
            known[key] = _microbatch_code(joint, key, place_of, tier)
    return [known[tuple(segments[i])] for i in sorted(segments)]


def _emitter(joint: Joint, steps: tuple[Step, ...], tier: TierCopies) -> EagerEmitter:
    schedule = Schedule(steps, joint.graph.hash)
    repeated = {name for name, count in schedule.computations().items() if count > 1}
    again, none = set[str](), frozenset[str]()
    if not schedule.moves:
        return EagerEmitter(joint, _refuse_dead, again, repeated, none, True)
    moving = CopyContext(tier, copy_times(schedule, lambda op: written_by(joint, op)))
    return CopyEmitter(moving, joint, _refuse_dead, again, repeated, none, True)


def _refuse_dead(what: Demanded) -> NoReturn:
    raise RewriteError(f"the plan of the whole step reads {what} where it is not live")


@dataclass(frozen=True)
class StepCode:
    """What is the same in each step."""

    actions: Sequence[StepAction]
    codes: Sequence[Steps]
    results: JointResults


@dataclass
class StepRun:
    """One step under way.

    `inputs` has all of the joint graph for each microbatch, `losses` those of forwards that ended.
    `updated` are the parameters that were stepped, `updating` is the one that is being stepped.
    """

    code: StepCode
    optimizer: Optimizer
    residents: Residents
    inputs: Sequence[list[Any]]
    losses: list[Tensor] = field(default_factory=list[Tensor])
    updated: list[str] = field(default_factory=list[str])
    updating: str = ""

    def __post_init__(self) -> None:
        self.held, self.groups = dict(self.residents.held), parameter_groups(self.optimizer)
        self.waiting: dict[tuple[str, int], Tensor] = {}
        self.running: dict[int, Iterator[Released]] = {}

    def run(self) -> list[Tensor]:
        # As AOTAutograd runs backward: the graph already contains autocast's casts.
        with torch.no_grad(), DisableAutocast():
            for action in self.code.actions:
                self._carry_out(action)
        return self.losses

    def stop(self) -> None:
        for one in self.running.values():
            one.close()  # pyright: ignore[reportAttributeAccessIssue]  # it is a generator
        self.running.clear()
        self.waiting.clear()
        for name, one in self.held.items():
            if name.startswith("G:"):
                one.settle()
        if self.updating:
            # An update that was cut short must not leave a gradient for the next step.
            self.residents.parameters[self.updating][1].grad = None

    def _carry_out(self, action: StepAction) -> None:
        if isinstance(action, Resume):
            self._resume(action)
        elif isinstance(action, Add):
            total = self.held[f"G:{action.parameter}"]
            total.arrive()
            gradient = self.waiting.pop((action.parameter, action.microbatch))
            # Lower copies lack this addition.
            total.copied.clear()
            total.whole[0].add_(gradient)
        elif isinstance(action, StepOf):
            self._step(action.parameter)
        elif isinstance(action, Gather | Reduce):
            self._communicate(action)
        elif isinstance(action, Fetch):
            self.held[action.value].fetch(action.to)
        elif isinstance(action, Offload):
            self.held[action.value].offload(action.to)
        elif action.at != "device":
            self.held[action.value].forget_below(action.at)
        elif action.value in self.held:  # a gradient that is not summed goes with its addition
            self.held[action.value].leave()
        elif action.value.startswith("A:"):
            self._ranks.drop(action.value[2:])

    @property
    def _ranks(self) -> ShardedResidents:
        assert isinstance(self.residents, ShardedResidents)
        return self.residents

    def _communicate(self, action: Gather | Reduce) -> None:
        if isinstance(action, Gather):
            self._ranks.gather(action.parameter)
            return
        key = action.parameter, action.microbatch
        self._take(*key, self._ranks.reduced(self.waiting.pop(key)))

    def _take(self, name: str, i: int, gradient: Tensor) -> None:
        # The first microbatch's gradient becomes the sum.
        if i:
            self.waiting[name, i] = gradient
        else:
            what = f"the gradient of {self.residents.parameters[name][0]}"
            self.held[f"G:{name}"] = Held(what, [gradient], self.residents.folders)

    def _resume(self, action: Resume) -> None:
        for name in action.reads:
            self.held[name].arrive()
        i, segment = action.microbatch, action.segment
        if i not in self.running:
            # A new list, since the generator clears it.
            self.running[i] = self.code.codes[i](list(self.inputs[i]))
        places, given = next(self.running[i])
        found = dict(zip(places, given, strict=True))
        given.clear()  # the generator holds this list
        if segment.ends_forward:
            self.losses.append(found[self.code.results.loss_place])
            for place, written in self.code.results.written.items():
                # AOTAutograd returns the new values of buffers; eager writes them into the buffers.
                self.inputs[i][written].copy_(found[place])
        for name in segment.gradients:
            gradient = found.pop(self.code.results.place_of_gradient[name])
            if isinstance(self.residents, ShardedResidents):
                self.waiting[name, i] = gradient  # whole, until it is reduced
            else:
                self._take(name, i, gradient)

    def _step(self, name: str) -> None:
        for one in (name, f"O:{name}", f"G:{name}"):
            if one in self.held:
                self.held[one].arrive()
        parameter, state = self.residents.parameters[name][1], self.held.get(f"O:{name}")
        # Ctrl-C waits: an update happens completely or not at all.
        with uninterrupted(), self.residents.owned(name):
            self.updating = name
            # Lower copies lack this update.
            self.held[name].copied.clear()
            parameter.grad = self.held.pop(f"G:{name}").whole[0]
            step_of(self.optimizer, [parameter], self.groups)
            parameter.grad = None
            if state is not None:
                # The first step creates the state.
                state.adopt(moments(self.optimizer, parameter).values())
            self.updated.append(name)
            self.updating = ""


class WholeStep:
    """One call is one optimizer step: what eager's loop over microbatches does, to the bit.

    ``step(args, targets=targets)`` computes what this does::

        for one, target in zip(args, targets):
            loss_fn(model(*one), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    Gradients are those of the losses as they are. For a mean over microbatches, let `loss_fn`
    divide by their number, as eager's loop does. With several ranks, each gives batches of its own,
    and the gradients of a microbatch are means over ranks before they are added.

    Parameters, gradients and the optimizer's state are in files where the plan has them below the
    device. Between steps the tensors of such parameters and states are empty. They are brought back
    by themselves before `state_dict` and `load_state_dict` of the model and the optimizer and
    before a call of the model, else by `bring_back`, by `close` and when this object goes.

    Attributes
    ----------
    graph, schedule, simulation : what is carried out, op by op, and what the simulator says of it.
    resting_bytes : in memory between steps. What a step takes above that is
        ``simulation.peak_bytes - resting_bytes``.
    """

    def __init__(
        self, guards: Guards, optimizer: Optimizer, code: StepCode, residents: Residents,
        step: StepOfOps, trained: Mapping[str, nn.Parameter],
    ) -> None:  # fmt: skip
        self.graph, self.schedule = step.graph, step.schedule
        self.simulation, self.resting_bytes = step.simulation, step.resting_bytes
        self.microbatches = len(code.codes)
        self._guards, self._optimizer, self._code = guards, optimizer, code
        self._residents, self._trained = residents, trained
        self._watch = MemoryWatch(guards.model, optimizer, residents)
        self._lock, self._is_closed = threading.Lock(), False
        # A module-level function: a method would keep this object alive. At exit, nobody reads the
        # tensors any more.
        end = weakref.finalize(self, _end, self._watch, residents)
        end.atexit = False

    def __call__(
        self,
        args: Sequence[tuple[Any, ...]] = (),
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        targets: Sequence[Any] | None = None,
    ) -> list[Tensor]:
        """Take one optimizer step; the losses of its microbatches, detached.

        Parameters
        ----------
        args, kwargs, targets : of each microbatch, its positional and keyword arguments and its
            target, as they were captured.

        Raises
        ------
        RewriteError : the model or a batch is not as captured, or there are gradients already;
            nothing has run then. TierError : a copy has failed.

        Whatever else ends a step early, all parameters and states are back in memory, and a note
        at the exception says which of them had been updated.
        """
        # Do not wait: a step called within a step would wait for itself.
        if not self._lock.acquire(blocking=False):
            raise RewriteError(
                f"let the step of this {self._guards.kind} end before the next: it is still running"
            )
        try:
            return self._step(args, kwargs, targets)
        finally:
            self._lock.release()

    def bring_back(self, *, whole: bool = False) -> None:
        """Bring all parameters and states into memory; the next step sends them down again.

        With several ranks, each has its shards then: rows of the first dimension. `whole`, called
        on all ranks, gives each all of them; without, `state_dict` and forward are refused.
        """
        if whole:
            self._residents.make_whole()
        else:
            self._residents.bring_back()

    def close(self) -> None:
        """Bring all back for good, on all ranks at once; no further step can be taken."""
        if not self._is_closed:
            self._residents.make_whole()
        self._is_closed = True
        _end(self._watch, self._residents)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"WholeStep({self._guards.kind}: {self.microbatches} microbatches, peak "
            f"{self.simulation.peak_bytes} bytes, {self.simulation.host_peak_bytes} on the host, "
            f"{self.simulation.nvme_peak_bytes} on NVMe)"
        )

    def _batches(
        self, args: Sequence[tuple[Any, ...]], kwargs: Sequence[Mapping[str, Any]] | None,
        targets: Sequence[Any] | None,
    ) -> list[Any]:  # fmt: skip
        count, kind = self.microbatches, self._guards.kind
        if self._is_closed:
            raise RewriteError(f"make another step to train on: this one of {kind} is closed")
        if self._guards.takes_target and targets is None:
            raise RewriteError(
                f"give targets= too, one for each microbatch: the step of {kind} was captured "
                "with a target"
            )
        named = kwargs if kwargs is not None else [{}] * count
        aims = targets if targets is not None else [None] * count
        found = len(args) or (count if kwargs is not None else 0)
        if {found, len(named), len(aims)} != {count}:
            raise RewriteError(
                f"give args as a list of {count} tuples, targets likewise: a step of this "
                f"{kind} takes {count} microbatches, and got {found}, with {len(aims)} targets"
            )
        calls = args or [()] * count
        for one in calls:
            if not isinstance(one, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RewriteError(
                    f"write [(x,) for x in batches]: a microbatch of this {kind} is a tuple of "
                    f"positional arguments, not a {type(one).__name__}"
                )
        return [(one, dict(two), aim) for one, two, aim in zip(calls, named, aims, strict=True)]

    def _step(self, *given: Any) -> list[Tensor]:
        run: StepRun | None = None
        try:
            inputs = self._begun(*given)
            self._watch.begin()
            run = StepRun(self._code, self._optimizer, self._residents, inputs)
            self._residents.send_down()
            losses = run.run()
            self._residents.rest()
            return losses
        # Ctrl-C included.
        except BaseException as error:
            with uninterrupted():
                self._recover(run, error)
            raise

    def _begun(self, *given: Any) -> list[list[Any]]:
        """The inputs of each microbatch; refused, on all ranks, before anything has run."""
        try:
            batches = self._batches(*given)
            # Guards compare shapes, and tensors at rest are empty.
            self._residents.begin()
            inputs = [self._inputs(batch) for batch in batches]
            self._require_training()
        except Exception as error:
            self._residents.agree(error)
            raise
        self._residents.agree(None)
        return inputs

    def _require_training(self) -> None:
        if not self._guards.model.training:
            raise RewriteError(
                f"call model.train() before a step: this {self._guards.kind} is in eval mode"
            )
        for path, parameter in self._trained.items():
            if parameter.grad is not None:
                raise RewriteError(
                    f"call optimizer.zero_grad() before a step: {path} of {self._guards.kind} "
                    "already has a gradient, to which eager would add"
                )

    def _inputs(self, batch: Any) -> list[Any]:
        state, leaves = self._guards.require(batch)
        # The graph contains its own backward, so autograd must not record it.
        return [*(t.detach() for t in state), *leaves, self._code.results.tangent]

    def _recover(self, run: StepRun | None, error: BaseException) -> None:
        if run is None:
            # Nothing has run: empty again what is below.
            self._residents.rest()
            return
        run.stop()
        # Whatever happened, all tensors are back in memory.
        self._residents.bring_back()
        paths = [self._residents.parameters[name][0] for name in run.updated]
        torn = self._residents.parameters[run.updating][0] if run.updating else ""
        if torn:
            error.add_note(f"remat: the update of {torn} was cut short: load it from a checkpoint")
        elif not paths:
            error.add_note(
                "remat: no parameter was updated; all are in memory, as before this step"
            )
        if paths:
            error.add_note(
                f"remat: {len(paths)} of {len(self._trained)} parameters were updated, "
                f"{paths[-1]} last; the others are as before this step. All are in memory"
            )


def _end(watch: MemoryWatch, residents: Residents) -> None:
    residents.attach()
    residents.bring_back()
    residents.close()
    watch.end()
