"""What the modules of a model do in steps of eager's: time, memory, and whether they may run twice.

Steps run on the user's batch, and what they change is put back. One tells which modules may run
twice, one how long each takes, one what is live as each begins, ends, and as backward comes to it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.devices.memory_events import Moment
from remat.graph_capture.devices.meter import LoadAwareTimer, Meter
from remat.graph_capture.distributed.dtensors import is_distributed
from remat.graph_capture.joint.nodes import TORCHS_NAMESPACES
from remat.graph_capture.python_state.module_hooks import FORWARD_HOOKS
from remat.graph_capture.python_state.state_guards import Change, PythonState
from remat.graph_capture.python_state.state_slots import MISSING, DictItem, is_same
from remat.graph_capture.torch_private.core import OpWatcher, innermost_transform, pytree
from remat.graph_capture.tracing.blocks import forward_wrapped
from remat.graph_capture.tracing.outputs import leaves_in
from remat.graph_capture.tracing.resident import storage_bytes
from remat.graph_capture.tracing.restore import ModuleAttributes, streams
from remat.parts.outside_writes import OutsideWrites
from remat.rewriter.checking.outcomes import fingerprint

BACKWARD = "backward"  # the moment at which backward begins
_PLAIN = (
    int, float, complex, str, bytes, type(None), enum.Enum, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

_WITHOUT_EFFECT = ("transformers.",)  # its hooks collect results while its own forward runs

_TIMED = 2  # steps, of which the shorter time of each call counts

CallKey = tuple[str, int]  # a module's path, and which of its calls in a step
_Step = Callable[[Callable[[], None]], Any]  # a step, which calls what it is given before backward


@dataclass
class ModuleCall:
    """One call of a module; `inside` is the call around it, None for the model's own."""

    key: CallKey
    inside: CallKey | None
    why_not: str = ""  # why it may not run twice
    written: tuple[str, ...] = ()  # buffers, by their paths below the module
    us: float = 0.0
    results_bytes: int = 0  # of what it returns, beyond what it was given
    held_bytes: int = 0  # of what it was given, and eager lets go of before backward comes

    def moment(self, which: str) -> str:
        """The name of a moment: it begins (``in``), ends (``out``) or is come to (``back``)."""
        return f"{self.key[0]} {self.key[1]} {which}"


@dataclass
class WatchedStep:
    """The calls of a step in the order in which they began, and its moments."""

    calls: dict[CallKey, ModuleCall]
    moments: list[Moment]
    step_us: float


_Around = Callable[[ModuleCall, nn.Module, Any], contextlib.AbstractContextManager[list[Any]]]


@contextlib.contextmanager
def _calls(model: nn.Module, around: _Around) -> Generator[dict[CallKey, ModuleCall]]:
    """The calls of the steps that run in the block. `around` is a context around each, and to its
    list what the call returns is added."""
    found, opened, count = dict[CallKey, ModuleCall](), list[CallKey](), Counter[str]()

    def run(path: str, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        call = ModuleCall((path, count[path]), opened[-1] if opened else None)
        count[path] += 1
        found[call.key] = call
        opened.append(call.key)
        try:
            if innermost_transform() is not None:  # its tensors have no storages to look at
                call.why_not = "a transform of torch.func calls it"
                return forward(*args, **kwargs)
            with around(call, module, (args, kwargs)) as results:
                output = forward(*args, **kwargs)
                results.append(output)
            return output
        finally:
            opened.pop()

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            if path and not isinstance(module, torch.jit.ScriptModule):
                stack.enter_context(forward_wrapped(module, functools.partial(run, path, module)))
        yield found


def watched_steps(
    model: nn.Module, meter: Meter, step: _Step, prepared: Callable[[Callable[[], Any]], Any],
    writes: OutsideWrites,
) -> WatchedStep:  # fmt: skip
    """`prepared` puts the state back, and runs what it is given. A step that `writes` to tensors
    outside of the state is refused."""

    def run(
        around: _Around | None = None, before_backward: Callable[[], None] = lambda: None
    ) -> Any:
        if around is None:
            return step(before_backward)
        with _calls(model, around) as calls:
            step(before_backward)
        return calls

    calls = _calls_of_a_try(_PythonLooks(model), run, prepared, writes)
    for _ in range(_TIMED):
        timed: dict[CallKey, ModuleCall] = prepared(lambda: run(functools.partial(_timed, meter)))
        for key, call in calls.items():
            if key in timed:
                call.us = min(call.us or math.inf, timed[key].us)
    step_us = min(prepared(lambda: meter.step_us(run)) for _ in range(_TIMED))

    def named(name: Callable[[str], None]) -> Any:
        moments = _Moments(name)

        def backward_begins() -> None:
            name(BACKWARD)
            for call, storage, size_bytes in moments.given:
                if call.key in calls and storage.expired():
                    calls[call.key].held_bytes += size_bytes

        return run(moments.of_call, backward_begins)

    return WatchedStep(calls, prepared(lambda: meter.moments(named)), step_us)


def _calls_of_a_try(
    looks: _PythonLooks, run: Callable[..., Any], prepared: Callable[[Callable[[], Any]], Any],
    writes: OutsideWrites,
) -> dict[CallKey, ModuleCall]:  # fmt: skip
    """The calls of a step, with what tells whether each may run twice."""

    def step() -> Any:
        with contextlib.ExitStack() as forward:
            forward.enter_context(writes)

            def backward_begins() -> None:
                forward.close()  # backward adds to gradients
                looks.backward_begins()

            return run(functools.partial(_trying, looks), backward_begins)

    calls: dict[CallKey, ModuleCall] = prepared(step)
    writes.require_none()
    looks.compare()
    return calls


@contextlib.contextmanager
def _timed(meter: Meter, call: ModuleCall, module: nn.Module, given: Any) -> Generator[list[Any]]:
    _wait(meter)
    watch = LoadAwareTimer()
    yield []
    _wait(meter)
    call.us = watch.taken_us


def _wait(meter: Meter) -> None:
    if is_cuda(meter.device):
        torch.cuda.synchronize(meter.device)


class _Moments:
    """Names the moments of calls as they come, and holds none of their tensors."""

    def __init__(self, name: Callable[[str], None]) -> None:
        self._name = name
        self.given = list[tuple[ModuleCall, StorageWeakRef, int]]()
        self._results: Any = WeakTensorKeyDictionary()  # by result: its calls, the outermost first
        self._come = set[CallKey]()

    @contextlib.contextmanager
    def of_call(self, call: ModuleCall, module: nn.Module, given: Any) -> Generator[list[Any]]:
        results, tensors = list[Any](), [t for t in leaves_in(given) if isinstance(t, Tensor)]
        dense = [t for t in tensors if t.layout is torch.strided and not is_distributed(t)]
        storages = [t.untyped_storage() for t in dense]
        distinct = {one._cdata: one for one in storages}.values()
        self.given += [(call, StorageWeakRef(one), one.nbytes()) for one in distinct]
        del given, tensors, dense, storages, distinct
        self._name(call.moment("in"))
        yield results
        self._name(call.moment("out"))
        for one in leaves_in(results):
            if isinstance(one, Tensor) and one.requires_grad:
                if one not in self._results:
                    self._results[one] = calls = list[ModuleCall]()
                    one.register_hook(functools.partial(self._backward_comes, calls))
                self._results[one].insert(0, call)
        results.clear()

    def _backward_comes(self, calls: list[ModuleCall], _: Tensor) -> None:
        for call in calls:
            if call.key not in self._come:  # the first of its results to get a gradient
                self._come.add(call.key)
                self._name(call.moment("back"))


# Whether a module may run twice.


def python_state_of(model: nn.Module) -> PythonState:
    state = PythonState(model)
    forwards = ((path, vars(m)) for path, m in model.named_modules())
    # A watched module has another there, and so does one that runs again.
    state.leave_out(DictItem(path, its, "forward", MISSING) for path, its in forwards)
    return state


class _PythonLooks:
    """Python's state that the model may read, as calls begin and end and as backward begins."""

    def __init__(self, model: nn.Module) -> None:
        self._state = python_state_of(model)
        self._last = dict[Any, Change]()
        self._begun = list[tuple[ModuleCall, nn.Module, dict[Any, Change]]]()

    def begins(self, call: ModuleCall, module: nn.Module) -> None:
        self._begun.append((call, module, self._state.since()))

    def set_since(self, call: ModuleCall) -> list[Change]:
        begun = next(seen for one, _, seen in reversed(self._begun) if one is call)
        return unlike(begun, self._state.since())

    def backward_begins(self) -> None:
        self._last = self._state.since()

    def compare(self) -> None:
        """A run in backward would read what was set after the first one. No module is watched now,
        as its code then reads more."""
        for call, module, seen in self._begun:
            others = unlike(seen, self._last)
            if others and not call.why_not and PythonState(module).compares_any(others):
                call.why_not = f"{others[0].text} is set after it, which it may read"


def unlike(before: dict[Any, Change], after: dict[Any, Change]) -> list[Change]:
    """What is another in one than in the other, of what `PythonState.since` gave twice."""
    both = ((before.get(key), after.get(key)) for key in {**before, **after})
    return [
        one or other  # pyright: ignore[reportReturnType]
        for one, other in both
        if one is None or other is None or not is_same(one.now, other.now)
    ]


@contextlib.contextmanager
def _trying(
    looks: _PythonLooks, call: ModuleCall, module: nn.Module, given: Any
) -> Generator[list[Any]]:
    results, leaves, ops = list[Any](), pytree.tree_leaves(given), _CustomOps()
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    modules = [one for one in leaves if isinstance(one, nn.Module)]
    before = _Before([module, *modules], tensors)
    looks.begins(call, module)
    with ops:
        yield results
    made = [one for one in leaves_in(results) if isinstance(one, Tensor)]
    seen = set[int]()
    storage_bytes(tensors, seen)
    call.results_bytes = storage_bytes(made, seen)
    call.written = before.written()
    reasons = (
        *before.reasons(), *(f"it sets {one.text}" for one in looks.set_since(call)),
        *(f"it runs {name}, which may act unseen" for name in ops.names),
        *_reasons_against(module, leaves, made),
    )  # fmt: skip
    call.why_not = next(iter(reasons), "")


class _Before:
    """The state of a module, that of modules it is given, and tensors it is, before a call."""

    def __init__(self, modules: list[nn.Module], given: list[Tensor]) -> None:
        module, *others = modules
        read = [*given, *(one for other in others for one in other.buffers())]
        read += [one for each in modules for one in (*each.parameters(), *_plain_tensors(each))]
        self._read = [(one, one._version) for one in read]
        # A batch norm writes to its statistics without a sign.
        self._buffers = [(name, one, fingerprint(one)) for name, one in module.named_buffers()]
        self._attributes, self._streams = [ModuleAttributes(one) for one in modules], streams()

    def written(self) -> tuple[str, ...]:
        return tuple(name for name, one, bits in self._buffers if fingerprint(one) != bits)

    def reasons(self) -> Iterator[str]:
        now = streams()
        yield from (f"it draws from {name}" for name in now if now[name] != self._streams[name])
        for attributes in self._attributes:
            yield from (f"it sets {one.text}" for one in attributes.written())
        if any(one._version != version for one, version in self._read):
            yield "it writes to its parameters, or to what it is given"


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    values = (value for one in module.modules() for value in vars(one).values())
    return (value for value in values if isinstance(value, Tensor))


def _reasons_against(module: nn.Module, given: list[Any], made: list[Tensor]) -> Iterator[str]:
    known = {id(one) for one in given if isinstance(one, Tensor)}
    if any(id(one) in known for one in made):
        yield "it returns what it is given"
    if not any(one.requires_grad for one in made):
        yield "no gradient comes to it"
    for one in given:
        if not isinstance(one, (*_PLAIN, Tensor, nn.Module)) or is_distributed(one):
            yield f"it is given a {type(one).__name__}"
    inner = (one for one in module.modules() if one is not module)
    hooks = (hook for one in inner for table in FORWARD_HOOKS for hook in vars(one)[table].values())
    for hook in hooks:
        if not str(getattr(hook, "__module__", "")).startswith(_WITHOUT_EFFECT):
            yield "a hook is on a module in it"


class _CustomOps(OpWatcher):
    """Notes the ops of other people's; what such an op does beside its result is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace not in TORCHS_NAMESPACES:
            self.names.append(str(func))
        return func(*args, **kwargs)
