"""A model that is no one graph, some modules of which run again in backward, each as a whole.

Eager's own code runs, and its own autograd: gradients are summed in eager's order, whatever else
reads what a module is given. Of a module that runs again autograd keeps what it is given, and none
of what its ops save; as backward comes to it, its forward runs again on the random numbers and
buffers of its first run (`torch.utils.checkpoint`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from remat.graph_capture.errors import RewriteError, StateChangedError
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.python_state.state_guards import Change
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.blocks import forward_wrapped
from remat.graph_capture.tracing.left_out import used_alone
from remat.graph_capture.tracing.restore import streams
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import apply_loss
from remat.parts.watched import python_state_of, unlike
from remat.rewriter.guards.live_state import LiveState, RecomputeInputs
from remat.rewriter.user_module.module import SharedState, in_modes
from remat.rewriter.user_module.own_forward import class_of_user
from remat.schedules.outcome import Check
from remat.schedules.plan import Prediction
from remat.schedules.schedule import Schedule

# By path of each module that runs again: the buffers that it writes to, by their paths below it,
# and the time of its forward in us.
_Again = Mapping[str, tuple[Sequence[str], float]]


class _Effects(NamedTuple):
    """What a call may change unseen by autograd."""

    versions: list[int]  # of the tensors that it did not write to when it was planned
    python: dict[Any, Change]
    streams: dict[str, Any]


class _RunsAgain:
    """Calls of one module, whose forward runs again in backward."""

    def __init__(self, module: nn.Module, written: Sequence[str], us: float) -> None:
        self.kind, self.module, self._live = type(module).__name__, module, LiveState(module)
        self.others: Mapping[nn.Module, _RunsAgain] = {}  # a run in backward has them run again too
        parts = [name.rpartition(".") for name in written]
        self.written = [(module.get_submodule(owner)._buffers, name) for owner, _, name in parts]
        read = [i for i, name in enumerate(self._live.names) if name not in written]
        self.inputs = RecomputeInputs(read, us)
        self._python = python_state_of(module)

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

    def seen(self) -> _Effects:
        state = self._live.read() or []
        read = [state[i] for i in self.inputs.places] if state else []
        versions = [0 if one.is_inference() else one._version for one in read]
        return _Effects(versions, self._python.since(), streams())

    def require_without_effect(self, before: _Effects, now: _Effects) -> None:
        """Refuse a call that did more than compute, as its second run would do it again."""
        versions = zip(self.inputs.places, before.versions, now.versions, strict=False)
        effects = chain(
            (f"write to {self._live.names[i]}" for i, one, other in versions if one != other),
            (f"set {one.text}" for one in unlike(before.python, now.python)),
            (f"draw from {one}" for one in now.streams if now.streams[one] != before.streams[one]),
        )
        if effect := next(effects, None):
            raise RewriteError(
                f"{effect} outside of {self.kind}, or plan again at a step that does so: it did "
                "not when it was planned, and runs again"
            )

    def require_as_left(self, left: _Effects) -> None:
        """Refuse a second run that may read what was set since the first."""
        if others := unlike(left.python, self._python.since()):
            raise RewriteError(
                f"set {others[0].text} after backward, or plan again at a step that sets it "
                f"before: {self.kind} runs again in backward, and may read it"
            )

    def noted(self, leaves: Sequence[Any]) -> Any:
        """What the second run is to find as it is now."""
        given = [(f"input {i}", one) for i, one in enumerate(leaves) if isinstance(one, Tensor)]
        state = self._live.read()
        if state is None:
            raise StateChangedError(f"plan it again: parts of {self.kind} came or went in its call")
        return self.inputs.noted(self._live.names, state, given)


class _Call:
    """The runs of one call: a context for those in backward, of which there may be several."""

    def __init__(self, of: _RunsAgain, leaves: Sequence[Any]) -> None:
        self._of, self._leaves = of, leaves
        self._before: list[Tensor] = []
        self._open: list[contextlib.ExitStack] = []

    def contexts(self) -> tuple[Any, Any]:
        return self._first(), self

    @contextlib.contextmanager
    def _first(self) -> Generator[None]:
        held = (table[name] for table, name in self._of.written)
        self._before = [buffer.clone() for buffer in held if buffer is not None]
        before = self._of.seen()
        yield
        self._left = self._of.seen()
        self._of.require_without_effect(before, self._left)
        self._noted, self._leaves = self._of.noted(self._leaves), ()
        self._modes = modes_of(self._of.module)

    def __enter__(self) -> None:
        self._of.inputs.require(self._noted, self._of.kind)
        with contextlib.ExitStack() as stack:
            for (table, name), before in zip(self._of.written, self._before, strict=True):
                stack.callback(table.__setitem__, name, table[name])
                table[name] = before.clone()  # which this run may write to
            stack.enter_context(_running_again(self._of.others))
            stack.enter_context(in_modes(self._of.module, self._modes))
            with forward_wrapped(self._of.module, self._of):  # as its first run has it
                self._of.require_as_left(self._left)
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
    _remat_modules: ClassVar[list[nn.Module]]
    _remat_modes: ClassVar[dict[str, bool]]
    _remat_known: ClassVar[Mapping[str, Any]]
    _remat_check: ClassVar[Check | None] = None

    def _remat_train(self, batch: Any) -> Any:
        cls, model = type(self), self._remat_original_module
        cls._remat_unplanned.plan_runs()
        leaves, spec = pytree.tree_flatten(batch)
        cls._remat_signature.require(leaves, spec, type(model).__name__)
        if [*model.modules()] != cls._remat_modules or modes_of(model) != cls._remat_modes:
            raise StateChangedError(
                f"plan it again: modules of {type(model).__name__} came, went, or are in another "
                "mode than when it was planned"
            )
        if _trained(model) != cls._remat_trained:
            raise StateChangedError(
                f"plan it again: other parameters of {type(model).__name__} are trained than when "
                "it was planned, and what a step saves is other"
            )
        args, kwargs, target = batch
        with _running_again(cls._remat_again):
            output = model.forward(*args, **kwargs)
        return apply_loss(cls._remat_loss_fn, used_alone(output, cls._remat_outputs), target)

    @classmethod
    def _remat_recipe_to_pickle(cls) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return functools.partial(make_in_parts, **cls._remat_known), (cls._remat_original_module,)


def _trained(model: nn.Module) -> tuple[bool, ...]:
    return tuple(parameter.requires_grad for parameter in model.parameters())


def modes_of(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


def make_in_parts(model: nn.Module, **known: Any) -> PartsModule:
    """`known` : loss_fn, signature, again (as `_Again`), modes, share, outputs, schedule, and its
    prediction and coarse graph, costed."""
    again: _Again = known["again"]
    runs = {model.get_submodule(path): facts for path, facts in again.items()}
    made = {module: _RunsAgain(module, *facts) for module, facts in runs.items()}
    for module, one in made.items():
        one.others = {other: its for other, its in made.items() if other is not module}
    kind = class_of_user(
        PartsModule, model, known["loss_fn"],
        modules_again=tuple(again), planned_share=known["share"], schedule=known["schedule"],
        _remat_again=made, _remat_trained=_trained(model), _remat_known=known,
        _remat_modules=[*model.modules()],
        **{f"_remat_{k}": v for k, v in known.items() if k not in ("again", "loss_fn")},
    )  # fmt: skip
    return kind()
