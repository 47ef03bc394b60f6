"""A model that is no one graph, some modules of which run again in backward, each as a whole.

Eager's own code runs, and its own autograd: gradients are summed in eager's order, whatever else
reads what a module is given. Of a module that runs again autograd keeps what it is given, and none
of what its ops save; as backward comes to it, its forward runs again on the random numbers and
buffers of its first run (`torch.utils.checkpoint`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat.graph_capture.errors import StateChangedError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.blocks import forward_wrapped
from remat.graph_capture.tracing.left_out import Outputs, used_alone
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import LossFunction, apply_loss
from remat.rewriter.guards.live_state import LiveState, RecomputeInputs
from remat.rewriter.user_module.module import SharedState
from remat.rewriter.user_module.own_forward import class_of_user
from remat.schedules.outcome import Check
from remat.schedules.plan import Prediction
from remat.schedules.schedule import Schedule

# By path of each module that runs again: what of its buffers it writes (path below it, and name),
# and the time of its forward in us.
_Again = Mapping[str, tuple[Sequence[tuple[str, str]], float]]
_Buffers = Sequence[tuple[nn.Module, str]]


class _RunsAgain:
    """Calls of one module, whose forward runs again in backward."""

    def __init__(self, module: nn.Module, written: _Buffers, us: float) -> None:
        self.kind, self.written, self._live = type(module).__name__, written, LiveState(module)
        self.others: Mapping[nn.Module, _RunsAgain] = {}  # a run in backward has them run again too
        kept = {(id(one), name) for one, name in written}
        read = [i for i, place in enumerate(self._live.names) if _slot(module, place) not in kept]
        self.inputs = RecomputeInputs(read, us)

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))

        def run(*given: Any) -> Any:
            own_args, own_kwargs = pytree.tree_unflatten(list(given), spec)
            return forward(*own_args, **own_kwargs)

        # As arguments of its own, as a checkpoint looks for devices in those alone.
        contexts = _Call(self, leaves).contexts
        return checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)

    def noted(self, leaves: Sequence[Any]) -> Any:
        """What the second run is to find as it is now."""
        given = [(f"input {i}", one) for i, one in enumerate(leaves) if isinstance(one, Tensor)]
        state = self._live.read()
        if state is None:
            raise StateChangedError(f"plan it again: parts of {self.kind} came or went in its call")
        return self.inputs.noted(self._live.names, state, given)


def _slot(module: nn.Module, place: str) -> tuple[int, str]:
    path, _, name = place.rpartition(".")
    return id(module.get_submodule(path)), name


class _Call:
    """The runs of one call: a context for those in backward, of which there may be several."""

    def __init__(self, of: _RunsAgain, leaves: Sequence[Any]) -> None:
        self._of, self._leaves = of, leaves
        self._places = [(one._buffers, name) for one, name in of.written]
        self._before: list[Tensor] = []
        self._open: list[contextlib.ExitStack] = []

    def contexts(self) -> tuple[Any, Any]:
        return self._first(), self

    @contextlib.contextmanager
    def _first(self) -> Generator[None]:
        held = (table[name] for table, name in self._places)
        self._before = [buffer.clone() for buffer in held if buffer is not None]
        yield
        self._noted, self._leaves = self._of.noted(self._leaves), ()

    def __enter__(self) -> None:
        self._of.inputs.require(self._noted, self._of.kind)
        with contextlib.ExitStack() as stack:
            for (table, name), before in zip(self._places, self._before, strict=True):
                stack.callback(table.__setitem__, name, table[name])
                table[name] = before.clone()  # which this run may write to
            stack.enter_context(_running_again(self._of.others))
            self._open.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._open.pop().close()


@contextlib.contextmanager
def _running_again(modules: Mapping[nn.Module, _RunsAgain]) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        for module, again in modules.items():
            stack.enter_context(forward_wrapped(module, again))
        yield


class PartsModule(SharedState, nn.Module):
    """A module that trains as the user's, by its own code, with its ``__dict__`` itself."""

    schedule: ClassVar[Schedule]
    modules_again: ClassVar[tuple[str, ...]]  # paths of those that run again in backward
    planned_share: ClassVar[float]  # of what forward saves, that of modules that might
    audit: ClassVar[None] = None  # no graph stands in for the model's code
    _remat_again: ClassVar[Mapping[nn.Module, _RunsAgain]]
    _remat_schedule: ClassVar[Schedule]  # of a coarse graph, as its costs
    _remat_prediction: ClassVar[Prediction | None]
    _remat_costed: ClassVar[TrainingGraph | None]
    _remat_signature: ClassVar[Signature]
    _remat_trained: ClassVar[tuple[bool, ...]]
    _remat_facts: ClassVar[tuple[Any, ...]]
    _remat_check: ClassVar[Check | None] = None

    def _remat_train(self, batch: Any) -> Any:
        cls = type(self)
        cls._remat_unplanned.plan_runs()
        leaves, spec = pytree.tree_flatten(batch)
        cls._remat_signature.require(leaves, spec, type(cls._remat_original_module).__name__)
        cls._remat_require_trained()
        args, kwargs, target = batch
        with _running_again(cls._remat_again):
            output = cls._remat_original_module.forward(*args, **kwargs)
        return apply_loss(cls._remat_loss_fn, used_alone(output, cls._remat_outputs), target)

    @classmethod
    def _remat_require_trained(cls) -> None:
        model = cls._remat_original_module
        if _trained(model) != cls._remat_trained:
            raise StateChangedError(
                f"plan it again: other parameters of {type(model).__name__} are trained than when "
                "it was planned, and what a step saves is other"
            )

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _remade, (cls._remat_original_module, *cls._remat_facts)


def _trained(model: nn.Module) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in model.parameters())


def make_in_parts(
    model: nn.Module, loss_fn: LossFunction | None, signature: Signature, again: _Again,
    share: float, outputs: Outputs | None, schedule: Schedule, **facts: Any,
) -> PartsModule:  # fmt: skip
    """`facts` : prediction and costed, as of `facts_of`."""
    runs = dict[nn.Module, _RunsAgain]()
    for path, (written, us) in again.items():
        module = model.get_submodule(path)
        places = [(module.get_submodule(below), name) for below, name in written]
        runs[module] = _RunsAgain(module, places, us)
    for module, one in runs.items():
        one.others = {other: its for other, its in runs.items() if other is not module}
    known = loss_fn, signature, again, share, outputs, schedule
    kind = class_of_user(
        PartsModule, model, loss_fn,
        modules_again=tuple(again), planned_share=share, _remat_again=runs, _remat_outputs=outputs,
        _remat_signature=signature, _remat_trained=_trained(model), _remat_facts=(known, facts),
        schedule=schedule, _remat_schedule=schedule,
        **{f"_remat_{name}": fact for name, fact in facts.items()},
    )  # fmt: skip
    return kind()


def _remade(model: nn.Module, known: tuple[Any, ...], facts: dict[str, Any]) -> PartsModule:
    return make_in_parts(model, *known, **facts)
