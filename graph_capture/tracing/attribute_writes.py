"""What forward writes while it is traced: each run begins alike, and what it wrote is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.graph_capture.errors import CaptureError
from remat.graph_capture.joint.nodes import draws_randomness, storage_key
from remat.graph_capture.joint.provenance import line_of_user
from remat.graph_capture.python_state.module_hooks import (
    BACKWARD_HOOKS,
    ModuleHooks,
    are_alike,
    holds_traced,
    hooked_modules,
    place_of_hooks,
)
from remat.graph_capture.python_state.state_guards import (
    Change,
    LibraryCache,
    PythonState,
    added_to_library,
)
from remat.graph_capture.python_state.state_slots import (
    MISSING,
    PLAIN,
    DictItem,
    OpaqueState,
    StateSlot,
    Stream,
    is_same,
)
from remat.graph_capture.python_state.tensor_attributes import Writer, other_threads
from remat.graph_capture.refusals import hook_tables, registered_hook
from remat.graph_capture.torch_private.core import CallWatcher, pytree
from remat.graph_capture.tracing.outputs import DuplicateOutputs
from remat.graph_capture.tracing.restore import ModuleAttributes, Written

# Each step sets such tensors as eager does, as a mixture of experts keeps its auxiliary loss. A
# counter that forward reads and changes needs another graph at each step, so it is refused.


@dataclass(frozen=True)
class MutatedAttribute:
    """An attribute that each step sets: a tree of tensors and constants."""

    path: str
    name: str
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # (is_tensor, constant) by leaf; the constant of a tensor is None
    tensors: int
    is_read: bool  # forward reads it too, so it may keep something for later
    before: frozenset[int] = frozenset()  # storages of the tensors that it held until now

    @property
    def text(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    def put(self, module: nn.Module, tensors: list[Tensor]) -> None:
        given = iter(tensors)
        leaves = [next(given) if is_tensor else leaf for is_tensor, leaf in self.leaves]
        setattr(module, self.name, pytree.tree_unflatten(leaves, self.spec))


@dataclass(frozen=True)
class InitialisedOnce:
    """A place that forward finds empty at its first call, and then leaves at a plain value."""

    place: StateSlot | OpaqueState  # with what was there before
    value: Any  # what each step leaves there

    def put(self) -> None:
        self.place.put(self.value)

    def is_first(self, now: Any) -> bool:
        return is_same(now, self.place.value)


def out_of_step(initialised: Iterable[InitialisedOnce]) -> tuple[InitialisedOnce, Any] | None:
    """The first place that is neither as before the first call nor as after it, and its value."""
    found = [(one, one.place.now()) for one in initialised]
    if all(one.is_first(now) for one, now in found):
        return None
    for one, now in found:
        # Forward sets hooks at its first call alone: once any place is set, they must be there.
        may_be_first = not isinstance(one.place, ModuleHooks)
        if not is_same(now, one.value) and not (may_be_first and one.is_first(now)):
            return one, now
    return None


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def state_guarded(
    model: nn.Module, loss_fn: Callable[..., Any] | None, mutated: Iterable[MutatedAttribute],
    traced: PythonState,
) -> PythonState:  # fmt: skip
    """Python's state now, without what each step sets; `traced`: that of the model as traced."""
    state = PythonState(model, loss_fn, traced.code_in_scope)
    state.compare_as(traced)
    state.asks_identity = traced.asks_identity
    state.leave_out(places_of(model, mutated))
    state.compare_items_of(replace(place, value=place.now()) for place in traced.grown)
    return state


def places_of(model: nn.Module, mutated: Iterable[MutatedAttribute]) -> list[DictItem]:
    held = [(vars(model.get_submodule(one.path)), one) for one in mutated]
    return [DictItem(one.text, space, one.name, space.get(one.name)) for space, one in held]


def storages_in(leaves: Iterable[Any]) -> frozenset[int]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # A sparse tensor has no storage, so its identity stands for it.
    return frozenset(storage_key(t) if t.layout is torch.strided else id(t) for t in tensors)


_HELD_BY_TORCH = frozenset({"_parameters", "_buffers", "_modules"})
"""AOTAutograd has its own tensors in the place of these while forward runs."""


class ForwardWrites:
    """Follows the runs of forward in one trace: each begins alike, and what it wrote is kept."""

    def __init__(self, model: nn.Module, loss_fn: Any, state: PythonState) -> None:
        self._kind, self._state = type(model).__name__, state
        self._attributes = ModuleAttributes(model, but=_HELD_BY_TORCH)
        self._hooked = list(hooked_modules(model, loss_fn))
        self._hooks = [place_of_hooks(path, module) for path, module in self._hooked]
        self.mutated: list[MutatedAttribute] = []  # of the last run of forward alone
        self.initialised: list[InitialisedOnce] = []
        self.library_caches: list[LibraryCache] = []  # no later step adds to these
        self._in_forward: set[str] = set()

    def begin(self) -> None:
        self._attributes.restore()
        self._state.restore()
        for place in self._hooks:
            place.put(place.value)

    def end(self) -> list[Tensor]:
        """Tensors that forward has set on attributes; `CaptureError` for what no step can set."""
        tensors: list[Tensor] = []
        earlier = self._plain_values()  # what is no tensor must be the same, unlike a clock
        self.mutated, self.initialised, self.library_caches = [], [], []
        for written in self._attributes.written():
            leaves, spec = pytree.tree_flatten(written.value)
            is_read = self._state.reads(vars(written.module), written.name)
            # A flag of the first call. After the trace it is seen whether the next is alike.
            if is_read and _is_first_value(written.before, written.value):
                self.initialised.append(InitialisedOnce(written.place, written.value))
                continue
            own = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            # A constant that forward reads may choose another way through it at the next step.
            is_known = all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)
            if not is_known or (is_read and not own):
                raise self._refused(written)
            kept = tuple((True, None) if isinstance(x, Tensor) else (False, x) for x in leaves)
            before = storages_in(pytree.tree_leaves(written.held))  # read from an earlier step
            facts = spec, kept, len(own), is_read, before
            self.mutated.append(MutatedAttribute(written.path, written.name, *facts))
            tensors += own
        self._note_hooks()
        self._require_nothing_else()
        self._require_as_in(earlier)
        return tensors

    def _plain_values(self) -> dict[str, Any]:
        values = {one.place.text: one.value for one in self.initialised}
        for one in self.mutated:
            items = enumerate(leaf for is_tensor, leaf in one.leaves if not is_tensor)
            values |= {f"item {i} of {one.text}" if i else one.text: leaf for i, leaf in items}
        return {text: value for text, value in values.items() if isinstance(value, PLAIN)}

    def _require_as_in(self, earlier: dict[str, Any]) -> None:
        now = self._plain_values()
        for text in earlier.keys() & now.keys():
            if not is_same(now[text], earlier[text]):
                raise CaptureError(
                    f"set {text} outside forward: forward of {self._kind} sets it to "
                    f"{short(now[text])}, and to {short(earlier[text])} when run again on the "
                    "same batch, but a plan's step would set one value each time"
                )

    def _note_hooks(self) -> None:
        if registered := registered_hook(hook_tables(self._hooked, BACKWARD_HOOKS)):
            raise CaptureError(
                f"set it outside forward: forward of {self._kind} sets a {registered}"
            )
        for place in self._hooks:  # transformers sets some on submodules at its first call
            now = place.now()
            if are_alike(now, place.value):
                continue
            if any(holds_traced(hook.function) for hook in now):
                raise CaptureError(
                    f"keep the tensor on an attribute instead: forward of {self._kind} sets a "
                    f"{place.text} that keeps a tensor of its batch for the next call"
                )
            self.initialised.append(InitialisedOnce(place, now))

    def require_that_backward_writes_nothing(self) -> None:
        texts = self._texts()  # one on a tensor runs only while backward is traced
        late = [one.text for one in self._attributes.written() if one.text not in texts]
        # What forward itself changed was judged when it ended.
        changed = [one for one in self._state.changes() if one.text not in self._in_forward]
        writers = (self._state.writer(one.place, in_backward=True) for one in changed)
        pairs = zip(changed, writers, strict=True)
        late += [one.text for one, writer in pairs if writer is Writer.FORWARD]
        if late:
            raise CaptureError(
                "set the hook on a parameter outside forward, or on the returned tensor: backward "
                f"of {self._kind} changes {late[0]}, as a hook does that forward sets on a "
                "tensor, and a plan's step would not call it"
            )

    def _texts(self) -> list[str]:
        own = [mutated.text for mutated in self.mutated]
        return own + [initialised.place.text for initialised in self.initialised]

    def _require_nothing_else(self) -> None:
        texts, changes = self._texts(), self._state.changes()
        self._in_forward = {change.text for change in changes}
        for change in changes:
            if any(text in change.text for text in texts):  # inside of one: "an item of ..."
                continue
            if isinstance(change.place, (OpaqueState, Stream)):
                raise CaptureError(
                    f"take {change.text} outside forward and pass it in as a tensor, or draw with "
                    f"torch: forward of {self._kind} takes its next item or number, or sets it, "
                    "and a plan's step would not"
                )
            if self._state.writer(change.place) is Writer.THREAD:
                raise CaptureError(_beside_text(self._kind, change))
            # Such a value is the same after each step, so each step may set it.
            if _is_first_value(change.before, change.now) or _is_mode(change.place):
                self.initialised.append(InitialisedOnce(change.place, change.now))
            elif memo := added_to_library(change):
                self.library_caches.append(memo)
            else:
                raise self._changed(change)

    def _changed(self, change: Change) -> CaptureError:
        return CaptureError(
            f"change {change.text} outside forward, before each step; or call the model once on a "
            "batch first, if only the first call changes "
            f"it{'; or remove the hook that does it' * any(p.value for p in self._hooks)}.\n"
            f"Forward of {self._kind} changes it from {short(change.before)} to "
            f"{short(change.now)}, and a step that follows a plan would not change it.\n"
            "Or leave the module that does it to eager, and plan the others (remat.rematerialize)"
        )

    def _refused(self, written: Written) -> CaptureError:
        line = self._state.stores.get(written.name)
        return CaptureError(
            "set it outside forward, or register a buffer, or keep a tensor there, which each "
            f"step sets: forward of {self._kind} sets attribute {written.text} to "
            f"{short(written.value)}{f' ({line})' if line else ''}, and a plan's step would not"
        )


def _beside_text(kind: str, change: Change) -> str:
    return (
        f"end the other thread ({other_threads()}) before you plan and train, or read the value "
        f"outside forward: it changes {change.text}, which forward of {kind} may read, from "
        f"{short(change.before)} to {short(change.now)}, and a plan holds for one value"
    )


def _is_first_value(before: Any, now: Any) -> bool:
    is_plain = isinstance(now, PLAIN) and now is not None  # False and None count as empty
    return is_plain and (before is MISSING or before is None or before is False)


def _is_mode(place: object) -> bool:
    # The mode of a module beside the model, such as a teacher of the loss.
    return isinstance(place, DictItem) and place.key == "training" and "_modules" in place.space


class UnreadSentinel:
    """Stands in an attribute that forward sets, to see whether it reads it before it does."""

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"something that an earlier step left is read ({name})")


def find_loop_carried(
    mutated: Iterable[MutatedAttribute], results: int, end: fx.Node,
    duplicate_outputs: DuplicateOutputs | None, constants: frozenset[int],
) -> list[MutatedAttribute]:  # fmt: skip
    """Attributes that forward may read from an earlier step, and sets to something else. `results`
    of the outputs are forward's, the mutated tensors last. `constants`: the graph's, by storage."""
    number = sum(one.tensors for one in mutated)
    if not number:
        return []
    outputs: Any = end.args[0]
    described = zip(end.meta["desc"][:results], outputs[:results], strict=True)
    # Outputs for mutated inputs come first, and have no index among the results.
    plain = [(what.idx, node) for what, node in described if hasattr(what, "idx")]
    distinct = [node for _, node in sorted(plain, key=lambda pair: pair[0])]
    nodes = (duplicate_outputs.of_leaves(distinct) if duplicate_outputs else distinct)[-number:]
    found: list[MutatedAttribute] = []
    for one in mutated:
        own, nodes = nodes[: one.tensors], nodes[one.tensors :]
        is_another = any(_depends_on_input(node) for node in own)  # code alone: alike at each step
        if one.is_read and (is_another or one.before & constants):
            found.append(one)
    return found


def _depends_on_input(node: Any) -> bool:
    stack, seen = [node], set[Any]()
    while stack:
        one = stack.pop()
        if not isinstance(one, fx.Node) or one in seen:
            continue
        seen.add(one)
        if one.op == "placeholder" or draws_randomness(one):
            return True
        stack.extend(one.all_input_nodes)
    return False


def is_same_graph(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    pairs = zip(a.graph.nodes, b.graph.nodes, strict=False)
    same = len(a.graph.nodes) == len(b.graph.nodes)
    return same and all(_is_same_node(a, m, b, n) for m, n in pairs)


def _is_same_node(a: fx.GraphModule, m: fx.Node, b: fx.GraphModule, n: fx.Node) -> bool:
    if (m.op, m.name, str(m.target)) != (n.op, n.name, str(n.target)):
        return False
    if m.op != "get_attr":
        return repr((m.args, m.kwargs)) == repr((n.args, n.kwargs))  # by text: NaN is NaN
    one, other = getattr(a, str(m.target)), getattr(b, str(n.target))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one is other:
        return one is other
    same = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
    return same and one.layout is torch.strided and torch.equal(one, other)


class NoSetData(CallWatcher):
    """While forward is traced, refuse code that gives a tensor other data."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.set_data: Any = torch.Tensor.data.__set__  # pyright: ignore

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A trace loses new data without a word, as torch's `vector_to_parameters` sets it.
        line = line_of_user() if func == self.set_data else ""  # torch does so too, beside it
        if line:
            raise CaptureError(
                "write into the tensor instead: tensor.data.copy_(other). Or do it outside "
                "forward, before or after the step.\n"
                f"Forward of {self.kind} gives a tensor other data, by .data ={line}, and a "
                "plan's step would not"
            )
        return func(*args, **kwargs)
