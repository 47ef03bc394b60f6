"""What a rewritten module checks before each training step: that all is as it was at capture.

Each difference is an error that names it: the static graph would run on and be wrong in silence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.distributed.dtensors import dtensor_layout, is_distributed
from remat.graph_capture.errors import RewriteError, StateChangedError
from remat.graph_capture.joint.provenance import path_in_model
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    FORWARD_HOOKS,
    ModuleHooks,
    hooked_modules,
)
from remat.graph_capture.python_state.state_guards import (
    Change,
    ObjectNames,
    PythonState,
    Watched,
    WatchedDicts,
    same_facts,
)
from remat.graph_capture.python_state.tensor_attributes import first_other, kept_attributes
from remat.graph_capture.refusals import Hooked, distributed_message, hook_tables, unheard_hook
from remat.graph_capture.torch_private.core import KERNEL_SETTINGS, kernel_settings, pytree
from remat.graph_capture.tracing.attribute_writes import InitialisedOnce, out_of_step, short
from remat.graph_capture.tracing.recipe import Recipe, autocast_state
from remat.graph_capture.tracing.resident import tied_places
from remat.graph_capture.tracing.signature import Signature
from remat.graph_capture.tracing.step_module import LossFunction, with_loss
from remat.rewriter.guards.live_state import (
    LiveState,
    UnshardedParameters,
    first_other_identity,
    first_shared,
    named_state,
)

_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})
"""Types that hold no other leaves. Of other types torch's walk knows."""


class BatchFlattener:
    """Takes batches apart, without torch's walk where arguments are leaves, as most are."""

    def __init__(self, signature: Signature) -> None:
        self._spec = signature.spec
        args, kwargs, target = signature.spec.children()
        parts = [*args.children(), *kwargs.children(), target]
        self._is_flat = all(part.is_leaf() for part in parts)
        self._args, self._names = args.num_children, list(kwargs.context or ())

    def leaves(self, batch: Any) -> tuple[list[Any], pytree.TreeSpec]:
        args, kwargs, target = batch
        if self._is_flat and len(args) == self._args and list(kwargs) == self._names:
            leaves = [*args, *kwargs.values(), target]
            if _LEAVES.issuperset(map(type, leaves)):
                return leaves, self._spec
        return pytree.tree_flatten(batch)

    def tree(self, leaves: list[Any]) -> Any:
        return pytree.tree_unflatten(leaves, self._spec)


# After a step that passed all guards, the same objects mostly stand in the same places. A few
# comparisons of many at once then replace guards, which take longer than a hundred small ops.

_TABLES = ("_parameters", "_buffers", "_modules")


def _same_objects(
    model: nn.Module, state: Sequence[Tensor], modes: Sequence[tuple[str, nn.Module, bool]],
    hooks: Sequence[tuple[str, nn.Module, str, dict[Any, Any]]],
) -> Callable[[], bool]:  # fmt: skip
    if not all(map(is_plain, state)):
        return lambda: False  # what C++ compares is made for plain tensors
    names = ObjectNames()
    tables = [getattr(m, name) for m in model.modules() for name in _TABLES]
    empty = tuple(table for table in tables if not table)
    empty += tuple(registered for _, _, _, registered in hooks)  # no hook was there, none may come
    watched = [*_namespaces(model, modes, names), *_filled(tables, names)]
    places, facts = WatchedDicts(watched, names), same_facts([*{id(t): t for t in state}.values()])
    return lambda: not any(empty) and places.hold() and facts()


def _namespaces(
    model: nn.Module, modes: Sequence[tuple[str, nn.Module, bool]], names: ObjectNames
) -> list[Watched]:
    of_mode = {id(module): mode for _, module, mode in modes}
    watched: list[Watched] = []
    for module in model.modules():
        own = vars(module)
        terms = [f"{names(own)}[{name!r}] is {names(getattr(module, name))}" for name in _TABLES]
        if id(module) in of_mode:
            terms.append(f"{names(own)}['training'] is {of_mode[id(module)]}")
        watched.append((own, terms))
    return watched


def _filled(tables: Sequence[dict[str, Any]], names: ObjectNames) -> list[Watched]:
    found: list[Watched] = []
    for table in filter(None, tables):
        terms = [f"{names(table)}[{names(key)}] is {names(item)}" for key, item in table.items()]
        found.append((table, [f"len({names(table)}) == {len(table)}", *terms]))
    return found


def is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


_NAMES = (  # of settings other than autocast that decide which ops and kernels a model runs
    *KERNEL_SETTINGS, "torch.get_default_dtype()", "torch.are_deterministic_algorithms_enabled()",
    "torch.is_autocast_cache_enabled()",
)  # fmt: skip


def _settings() -> tuple[Any, ...]:
    return (
        *kernel_settings(), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.is_autocast_cache_enabled(),
    )  # fmt: skip


MOST_LOOKS = 8  # of the quick test: not for objects that change at each step


class Guards:
    """The state that a plan relies on, read at rewriting and compared at every step."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, python_state: PythonState,
        initialised: tuple[InitialisedOnce, ...], forward: fx.GraphModule, backward: fx.GraphModule,
        written: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.kind, self.written = type(model).__name__, written  # places of inputs
        self.model, self.recipe = model, recipe
        self.batches = BatchFlattener(recipe.signature)
        self.python_state = python_state  # what forward and loss read
        self.initialised = initialised  # set at the first call alone
        self.takes_target = recipe.signature.has_target
        self.unhooked = _tables_to_stay_empty(model, recipe.loss_fn, python_state, initialised)
        # The module itself is in training mode, or its step would not run.
        self.modes = [(p, m, m.training) for p, m in model.named_modules() if p]
        self.step = with_loss(model, recipe.loss_fn)
        self.live = LiveState(self.step)
        state = [tensor for _, tensor in named_state(self.step)]
        self.facts = list(map(_facts, state))
        self.tied = tied_places(self.step)
        self.taken = [i for i in range(len(self.facts)) if i not in self.tied]
        self.names = [path_in_model(self.live.names[i]) for i in self.taken]
        self.input_names = [*self.names, *recipe.signature.names]
        of_state = [kept_attributes(state[i]) for i in self.taken]
        self.attributes = [*of_state, *recipe.signature.attributes]
        self.constants = _watched_constants(model, forward, backward)
        self.read_in_backward = self._named(constants_of(backward))
        self.settings = _settings()
        self.unsharded_parameters = UnshardedParameters()
        self._last: list[Tensor] = []
        self._is_same: Callable[[], bool] | None = None
        self._looks = 0

    def _named(self, constants: list[Tensor]) -> list[tuple[str, Tensor]]:
        # Tensors of inference mode do not tell whether they were written to.
        names = {id(tensor): f"attribute {path}" for path, _, _, tensor in self.constants}
        known = {id(t): t for t in constants if not t.is_inference()}
        return [(names.get(key, "a tensor that forward reads"), t) for key, t in known.items()]

    @property
    def captured_modes(self) -> dict[str, bool]:
        return {"": True, **{path: mode for path, _, mode in self.modes}}  # a model in training

    def require(self, batch: Any) -> tuple[list[Tensor], list[Any]]:
        """State that the step takes, tied tensors once, and the leaves of `batch`; or an error."""
        leaves, spec = self.batches.leaves(batch)
        self.recipe.signature.require(leaves, spec, self.kind)
        if other := self.recipe.signature.other_number(leaves):
            name, was, now = other
            raise StateChangedError(
                "make another plan for such batches, as remat.rematerialize without a batch does: "
                f"{self.kind} looks at the numbers of {name}, which were {was} when the step was "
                f"captured and are {now} now"
            )
        taken = self._model_state()
        self._require_attributes([*taken, *leaves])
        self._require_apart(taken, leaves)
        if change := self.python_state.first_change():
            error = self._changed(*_in_words(change))
            changes = self.python_state.changes()
            if changes and all(type(one.before) is type(one.now) is float for one in changes):
                numbers = tuple(one.text for one in changes)
                named = ", ".join(map(repr, numbers))
                how = f"remat.rematerialize(..., float_inputs=[{named}])"
                error = StateChangedError(f"let each step read it: {how}.\nOr {error}")
                error.numbers = numbers
            raise error
        if self.initialised and (left := out_of_step(self.initialised)):
            one, now = left
            raise self._changed(*_in_words(Change(one.place.text, one.value, now, one.place)))
        for path, module, attribute, tensor in self.constants:
            if getattr(module, attribute, None) is not tensor:
                raise self._changed(f"attribute {path}", "one tensor", "another one")
        self._require_context()
        return taken, leaves

    def _model_state(self) -> list[Tensor]:
        if unheard := unheard_hook([]):  # of all modules, which no object of the model shows
            raise RewriteError(unheard)
        with contextlib.suppress(KeyError):  # a name of another one, or none
            if self._is_same is not None and self._is_same():
                return list(self._last)
        if unheard := unheard_hook(self.unhooked):
            raise StateChangedError(unheard)
        for path, module, mode in self.modes:
            if module.training is not mode:
                raise self._changed(f"submodule {path}", _mode(mode), _mode(module.training))
        state = self._state()
        taken = [state[i] for i in self.taken]
        if self._looks < MOST_LOOKS:  # the next step is first compared with what has just passed
            self._looks += 1
            self._last = list(taken)
            self._is_same = _same_objects(self.step, state, self.modes, self.unhooked)
        return taken

    def _require_attributes(self, tensors: list[Any]) -> None:
        for i, (tensor, before) in enumerate(zip(tensors, self.attributes, strict=True)):
            if not before and not getattr(tensor, "__dict__", None):  # as most tensors
                continue
            names = self.python_state.of_tensors
            if other := isinstance(tensor, Tensor) and first_other(before, tensor, names):
                name, was, found = other
                of = self.input_names[i]
                raise self._changed(f"attribute {name} of {of}", short(was), short(found))

    def _require_apart(self, taken: list[Tensor], leaves: list[Any]) -> None:
        signature = self.recipe.signature
        as_captured = signature.firsts if signature.as_one else range(len(leaves))

        def counts(leaf: int) -> bool:
            # It matters only if code asks whether two are one, or the step writes to one.
            return self.python_state.asks_identity or len(taken) + leaf in self.written

        if len(leaves) > 1 and (other := first_other_identity(leaves, as_captured, counts)):
            i, first = other
            one, another = (signature.names[k] for k in (first, i))
            words = ("apart", "one tensor") if as_captured[i] == i else ("one tensor", "apart")
            raise self._changed(f"{one} and {another}", *words)
        if self.written and (pair := first_shared([*taken, *leaves], self.written, len(taken))):
            one, another = (self.input_names[k] for k in pair)
            raise RewriteError(
                f"pass a copy, {another}.clone(): it shares memory with {one}, which the "
                f"rewritten {self.kind} writes to, and the plan counts two tensors"
            )

    def _require_context(self) -> None:
        now = autocast_state()
        if now != self.recipe.autocast:
            raise self._changed("autocast", _shown(self.recipe.autocast), _shown(now))
        for name, before, found in zip(_NAMES, self.settings, _settings(), strict=True):
            if found != before:
                raise StateChangedError(
                    f"put it back, or capture and solve again: {name} was {before} when "
                    f"{self.kind} was rewritten and is {found} now, so eager may run other ops"
                )

    def _state(self) -> list[Tensor]:
        if (state := self.live.read()) is None:
            raise self._replaced()
        for i, (tensor, before) in enumerate(zip(state, self.facts, strict=True)):
            if _facts(tensor) != before:
                raise self._another(self.live.names[i], before, tensor)
        for later, first in self.tied.items():
            if state[later] is not state[first]:
                tied = f"tied to {self.live.names[first]}"
                raise self._changed(self.live.names[later], tied, "another parameter")
        return state

    def _another(self, name: str, before: tuple[Any, ...], tensor: Tensor) -> RewriteError:
        if is_distributed(tensor):
            return RewriteError(distributed_message(f"{name} of {self.kind}"))
        facts = zip(before, _facts(tensor), _FACT_TEXT, strict=True)
        texts = next((text(was), text(now)) for was, now, text in facts if was != now)
        return self._changed(name, *texts)

    def _replaced(self) -> RewriteError:
        now, before = [name for name, _ in named_state(self.step)], self.live.names
        if now == before:
            return self._changed("a submodule", "one object", "another one")
        missing, added = set(before).difference(now), set(now).difference(before)
        name = next((n for n in (*before, *now) if n in missing or n in added), before[0])
        words = ("there", "missing") if name in missing else ("missing", "there")
        return self._changed(name, *words)

    def _changed(self, what: str, before: str, now: str) -> StateChangedError:
        return StateChangedError(
            f"put it back, or capture and solve again: {what} of {self.kind} was {before} when "
            f"the step was captured and is {now} now"
        )


def _tables_to_stay_empty(
    model: nn.Module, loss_fn: LossFunction | None, python_state: PythonState,
    initialised: tuple[InitialisedOnce, ...],
) -> list[Hooked]:  # fmt: skip
    """Tables of hooks that were empty when the model was traced, and that no step fills."""
    places = (*python_state.places, *(one.place for one in initialised))
    known = {place.module for place in places if isinstance(place, ModuleHooks)}
    modules = list(hooked_modules(model, loss_fn))
    others = [(path, module) for path, module in modules if module not in known]
    return [*hook_tables(modules, BACKWARD_HOOKS), *hook_tables(others, FORWARD_HOOKS)]


def _mode(training: bool) -> str:
    return "in training mode" if training else "in eval mode"


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.shape, tensor.stride(), dtensor_layout(tensor)
    return tensor.requires_grad, tensor.dtype, tensor.device, *layout


_FACT_TEXT: tuple[Callable[[Any], str], ...] = (
    lambda trained: "trained" if trained else "frozen",
    str,
    lambda device: f"on {device}",
    lambda shape: f"of shape {list(shape)}",
    lambda stride: f"of strides {list(stride)}",
    lambda where: f"placed {list(where[1])} on {where[0]}" if where else "no DTensor",
)


def _in_words(change: Change) -> tuple[str, str, str]:
    what = change.text if " " in change.text else f"attribute {change.text}"
    if isinstance(change.before, Tensor) and isinstance(change.now, Tensor):
        return what, "one tensor", "another one"
    return what, short(change.before), short(change.now)


def _shown(state: tuple[Any, ...]) -> str:
    return ", ".join(f"{dtype} on {kind}" for kind, on, dtype in state if on) or "off"


def constants_of(*graphs: fx.GraphModule) -> list[Tensor]:
    names = [(g, str(n.target)) for g in graphs for n in g.graph.find_nodes(op="get_attr")]
    return [constant for g, name in names if isinstance(constant := getattr(g, name), Tensor)]


def _watched_constants(
    model: nn.Module, *graphs: fx.GraphModule
) -> list[tuple[str, nn.Module, str, Tensor]]:
    addresses = {constant.data_ptr() for constant in constants_of(*graphs)}
    return [
        (f"{path}.{name}".lstrip("."), module, name, item)
        for path, module in model.named_modules()
        for name, item in vars(module).items()
        if isinstance(item, Tensor) and item.data_ptr() in addresses
    ]
