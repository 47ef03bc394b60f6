"""A whole optimizer step that is called like a function: several microbatches, then the update."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from remat.graph_capture.errors import RewriteError
from remat.graph_capture.graph import TrainingGraph
from remat.rewriter.guards.forward import Guards
from remat.schedules.schedule import Schedule
from remat.schedules.simulation import Simulation
from remat.whole_step.residents import MemoryWatch, Residents, uninterrupted
from remat.whole_step.running import StepCode, StepRun


@dataclass(frozen=True)
class StepFacts:
    graph: TrainingGraph
    schedule: Schedule
    simulation: Simulation

    @property
    def resting_bytes(self) -> int:
        """In memory between steps: what is resident, and what has its home there."""
        there = (value.size_bytes for value in self.graph.values if value.home == "device")
        return self.graph.resident.total_bytes + sum(there)


class WholeStep:
    """One call is one optimizer step: what eager's loop over microbatches does, to the bit.

    ``step(args, targets=targets)`` computes what this does::

        for one, target in zip(args, targets):
            loss_fn(model(*one), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    Gradients are those of the losses as they are. For a mean over microbatches, let `loss_fn`
    divide by their number, as eager's loop does.

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
        facts: StepFacts, trained: Mapping[str, nn.Parameter],
    ) -> None:  # fmt: skip
        self.graph, self.schedule = facts.graph, facts.schedule
        self.simulation, self.resting_bytes = facts.simulation, facts.resting_bytes
        self.microbatches = len(code.codes)
        self._guards, self._optimizer, self._code = guards, optimizer, code
        self._residents, self._trained = residents, trained
        self._watch = MemoryWatch(guards.model, optimizer, residents)
        self._lock = threading.Lock()
        self._is_closed = False
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
        batches = self._batches(args, kwargs, targets)
        # Do not wait: a step called within a step would wait for itself.
        if not self._lock.acquire(blocking=False):
            raise RewriteError(
                f"a step of this {self._guards.kind} is under way: let it end before the next"
            )
        try:
            return self._step(batches)
        finally:
            self._lock.release()

    def bring_back(self) -> None:
        """Bring all parameters and states into memory; the next step sends them down again."""
        self._residents.bring_back()

    def close(self) -> None:
        """Bring all back for good; no further step can be taken."""
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
            raise RewriteError(f"this step of {kind} is closed: make another one to train on")
        if self._guards.takes_target and targets is None:
            raise RewriteError(
                f"the step of {kind} was captured with a target: give targets= too, one for each "
                "microbatch"
            )
        named = kwargs if kwargs is not None else [{}] * count
        aims = targets if targets is not None else [None] * count
        found = len(args) or (count if kwargs is not None else 0)
        if {found, len(named), len(aims)} != {count}:
            raise RewriteError(
                f"a step of this {kind} takes {count} microbatches, and {found} are given, with "
                f"{len(aims)} targets: give args as a list of {count} tuples, targets likewise"
            )
        calls = args or [()] * count
        for one in calls:
            if not isinstance(one, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RewriteError(
                    f"a microbatch of this {kind} is a tuple of positional arguments, and a "
                    f"{type(one).__name__} is given: write [(x,) for x in batches]"
                )
        return [(one, dict(two), aim) for one, two, aim in zip(calls, named, aims, strict=True)]

    def _step(self, batches: list[Any]) -> list[Tensor]:
        run: StepRun | None = None
        try:
            # Guards compare shapes, and tensors at rest are empty.
            self._residents.attach()
            inputs = [self._inputs(batch) for batch in batches]
            # Refuse before anything leaves the device.
            self._require_ready()
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

    def _inputs(self, batch: Any) -> list[Any]:
        state, leaves = self._guards.require(batch)
        # The graph contains its own backward, so autograd must not record it.
        return [*(t.detach() for t in state), *leaves, self._code.tangent]

    def _require_ready(self) -> None:
        if not self._guards.model.training:
            raise RewriteError(
                f"this {self._guards.kind} is in eval mode: call model.train() before a step"
            )
        for path, parameter in self._trained.items():
            if parameter.grad is not None:
                raise RewriteError(
                    f"{path} of {self._guards.kind} has a gradient already, to which eager would "
                    "add: call optimizer.zero_grad() before a step"
                )

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
            error.add_note(f"remat: the update of {torn} was broken off: load it from a checkpoint")
        if not paths:
            error.add_note(
                "remat: no parameter had been updated; all are in memory, as before this step"
            )
        else:
            error.add_note(
                f"remat: {len(paths)} of {len(self._trained)} parameters had been updated, the "
                f"last of them {paths[-1]}; the others are as before this step. All are in memory"
            )


def _end(watch: MemoryWatch, residents: Residents) -> None:
    residents.attach()
    residents.bring_back()
    residents.close()
    watch.end()
