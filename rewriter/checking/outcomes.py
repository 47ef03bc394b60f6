"""Outcomes of a step, compared bit for bit, or to a tolerance.

On a CUDA device eager is compared with itself first: sums in no fixed order differ in eager too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, MutableMapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from remat.graph_capture.devices.known_devices import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.distributed.dtensors import dtensor_layout, is_distributed, local_part
from remat.graph_capture.graph import FLOAT32_BYTES
from remat.graph_capture.joint.nodes import bits_of
from remat.graph_capture.python_state.state_guards import PythonState
from remat.graph_capture.python_state.tensor_attributes import with_attributes_of
from remat.graph_capture.torch_private.core import pytree
from remat.graph_capture.tracing.outputs import flatten_dataclasses
from remat.graph_capture.tracing.restore import ModuleAttributes
from remat.graph_capture.tracing.signature import leaves_with_paths
from remat.rewriter.checking.off_device import OffDeviceMemory, Read
from remat.rewriter.graphs.rng import save_rng_state, set_rng_state

Outcome = Mapping[str, Any]
"""What a step leaves, by name: outputs, gradients, buffers, random streams."""

_TIMES = 10.0
"""Where eager does not repeat itself, a result may be this many times as far from its first run as
its second run is. Both distances are rounding errors; a wrong gradient is off by far more.
"""


_TOLERANCE = 0.01
"""For compiled steps: how far a result may be from eager's, as a part of its norm. Kernels that are
fused otherwise round otherwise, and batch norm makes that as large as 1e-3. A wrong gradient, such
as that of another dropout mask, is off by its own size."""
_LEAST_PART = 1e-3
"""A result counts as at least this part of the norm of all results of its kind. Smaller ones are
made of rounding errors, such as the gradient of a bias before a batch norm."""
_ROUNDINGS = 16
"""A result of a type with few bits may always be off by this many units in the last place."""
_MOST_ROUNDING = _ROUNDINGS * torch.finfo(torch.bfloat16).eps
"""A result that is larger than noise may be off by no more than this part, 0.125, however far
rounding moves it. That of another dropout mask is off by more, from one element in a hundred on."""


class EagerVariation:
    """How far runs of eager from the same state are from the first of them, which gave `expected`.

    `noise` is the largest distance of an element, by the name of each tensor that another run gave
    otherwise; 0 where there is none to take.
    """

    def __init__(self, expected: Outcome) -> None:
        self.expected = expected
        self.noise: dict[str, float] = {}

    def add(self, again: Outcome) -> None:
        for name in unsteady_names(self.expected, again):
            noise = distance(self.expected[name], again.get(name))
            self.noise[name] = max(self.noise.get(name, 0.0), 0.0 if math.isnan(noise) else noise)


def differing_names(variation: EagerVariation, found: Outcome) -> tuple[str, ...]:
    expected, noise = variation.expected, variation.noise
    differing = [name for name in expected if not bitwise_equal(expected[name], found.get(name))]
    return tuple(
        name
        for name in differing
        if not distance(expected[name], found.get(name)) <= _TIMES * noise.get(name, -math.inf)
    )


def unsteady_names(expected: Outcome, again: Outcome) -> tuple[str, ...]:
    """Names of tensors that two runs of eager, from the same state, do not give alike."""
    changing = [name for name in expected if not bitwise_equal(expected[name], again.get(name))]
    return tuple(name for name in changing if isinstance(expected[name], Tensor))


def distance(expected: Any, found: Any) -> float:
    """The largest difference between elements; NaN where there is none to take."""
    if not _has_error(expected, found):
        return float("nan")
    return float((found.double() - expected.double()).abs().max())


def differing_beyond(
    expected: Outcome,
    found: Outcome,
    tolerance: float,
    moved: Mapping[str, float] | None = None,
) -> tuple[tuple[str, ...], float]:
    """Names of what is further off than `tolerance`, and the largest relative error.

    `moved` is how far rounding alone moves results. They may be off by `_TIMES` that, up to
    `_MOST_ROUNDING`. One that is not larger than `_TIMES` that is noise, and may be off by the
    tolerance of all results of its kind together.
    """
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for name, like in expected.items():
        if not _has_error(like, found.get(name)):
            # A random stream and the like has no error to tolerate.
            wrong += [] if bitwise_equal(like, found.get(name)) else [name]
            continue
        rounding = _TIMES * (moved or {}).get(name, 0.0)
        size, least = _size(expected, name, rounding), _least(like, rounding) if tolerance else 0.0
        errors[name] = _norm(found[name].double() - like.double()) / size if size else 0.0
        if not errors[name] <= max(tolerance, least):
            wrong.append(name)
    return tuple(wrong), max(errors.values(), default=0.0)


def _size(expected: Outcome, name: str, rounding: float) -> float:
    norm, of_all = _norm(expected[name]), _norm_of_kind(expected, name)
    # Noise sums up to other noise in other code, most where many roundings go one way. So only its
    # part in all results of its kind says whether it matters.
    return of_all if 0 < norm <= rounding else max(norm, _LEAST_PART * of_all)


def _least(like: Tensor, rounding: float) -> float:
    own, norm = _ROUNDINGS * torch.finfo(like.dtype).eps, _norm(like)
    return max(own, min(_MOST_ROUNDING, rounding / norm)) if norm > rounding else own


def _has_error(expected: Any, found: Any) -> bool:
    return (
        isinstance(expected, Tensor)
        and isinstance(found, Tensor)
        and expected.is_floating_point()
        and (expected.dtype, expected.shape) == (found.dtype, found.shape)
        and not bitwise_equal(expected, found)
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


def _norm_of_kind(outcome: Outcome, name: str) -> float:
    kind = name.split()[0]
    alike = [t for other, t in outcome.items() if other.split()[0] == kind]
    return sum(_norm(t) ** 2 for t in alike if isinstance(t, Tensor)) ** 0.5


def bitwise_equal(expected: Any, found: Any) -> bool:
    """Whether two results have the same bits; a NaN equals a NaN of the same bits."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        return torch.equal(expected, found) or torch.equal(bits_of(expected), bits_of(found))
    return expected is found or bool(expected == found)


STREAM = "random stream"
_Measure = TypeVar("_Measure")


class OwnBatch:
    """A batch for each run: the user's tensors, cut off from the graphs that made them."""

    def __init__(self, batch: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(batch)
        # The storages stay the user's, since copies would count in the peak.
        own: dict[int, Tensor] = {}
        self.leaves = [_cut_off(leaf, own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._asked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]

    def __call__(self) -> Any:
        for leaf, asked in zip(self.leaves, self._asked, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad is not asked:
                leaf.requires_grad_(asked)
        # Anew: a forward that takes a list apart takes apart one of its own.
        return pytree.tree_unflatten(self.leaves, self._spec)


def _cut_off(tensor: Tensor, own: dict[int, Tensor]) -> Tensor:
    # A tensor that is given twice stays one.
    if id(tensor) not in own:
        with torch.inference_mode(False):
            # Autograd saves no tensor of inference mode.
            cut = (tensor.clone() if tensor.is_inference() else tensor).detach()
            own[id(tensor)] = with_attributes_of(tensor, cut.requires_grad_(tensor.requires_grad))
    return own[id(tensor)]


@contextlib.contextmanager
def own_parameters(*models: nn.Module) -> Generator[None]:
    """Other parameters over the same storages meanwhile: without hooks, and without gradients."""
    # So no hook steps an optimizer in backward, and no gradient of the user's is added to. Tied
    # ones stay tied, as do those that the models share.
    made: dict[int, nn.Parameter] = {}
    tables = {id(m._parameters): m._parameters for model in models for m in model.modules()}
    places = [
        (held, name, parameter)
        for held in tables.values()
        for name, parameter in held.items()
        if parameter is not None
        if type(parameter) is nn.Parameter or is_distributed(parameter)
    ]
    try:
        for held, name, parameter in places:
            if id(parameter) not in made:
                other = nn.Parameter(parameter.detach(), parameter.requires_grad)
                made[id(parameter)] = with_attributes_of(parameter, other)
            held[name] = made[id(parameter)]
        yield
    finally:
        for held, name, parameter in places:
            held[name] = parameter


class StepState:
    """Gradients, buffers, the batch and the random streams as they were, on `device` and the CPU.

    `keep_parameters` says that forward may write to parameters too, as a momentum encoder's does.
    Copies and outcomes are kept `elsewhere`, or in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        device: str,
        python_state: PythonState | None = None,
        *,
        keep_parameters: bool = False,
        elsewhere: OffDeviceMemory | None = None,
    ) -> None:
        self.elsewhere = elsewhere
        self.model, self.python_state = model, python_state
        self.attributes = ModuleAttributes(model)
        self.batch = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        self.buffers = dict(model.named_buffers())
        self.leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.leaves |= {
            f"input {i}": t for i, t in enumerate(self.batch) if t.is_leaf and t.requires_grad
        }
        parameters = model.parameters() if keep_parameters else ()
        tensors = [*self.buffers.values(), *self.batch, *parameters]
        locals_of = [local_part(t.detach()) for t in tensors]
        keep = elsewhere.keep if elsewhere else _in_memory
        self.before = [(t, keep(t)) for t in locals_of]
        self.gradients = {name: leaf.grad for name, leaf in self.leaves.items()}
        self.streams = {name: save_rng_state(name) for name in dict.fromkeys((CPU, device))}

    @contextlib.contextmanager
    def put_back(self) -> Generator[None]:
        try:
            yield
        finally:
            self.reset()
            for name, leaf in self.leaves.items():
                leaf.grad = self.gradients[name]

    def reset(self) -> None:
        # Or a run would find what the one before it has cast.
        torch.clear_autocast_cache()
        with torch.no_grad():
            for tensor, read in self.before:
                if not torch.equal(tensor, value := read()):
                    tensor.copy_(value)
                del value
        for device, state in self.streams.items():
            set_rng_state(state, device)
        for leaf in self.leaves.values():
            leaf.grad = None
        self.attributes.restore()
        if self.python_state is not None:
            self.python_state.restore()

    def prepared(self, run: Callable[[], _Measure], accumulate: bool) -> _Measure:
        self.reset()
        if accumulate:
            for leaf in self.leaves.values():
                leaf.grad = torch.zeros_like(leaf)
        return run()

    def outcome(self, run: Run) -> Outcome:
        """Every output, gradient and buffer after one step, by name, and the random streams."""
        self.reset()
        found: MutableMapping[str, Any] = self.elsewhere.outcome() if self.elsewhere else {}
        copy = self.elsewhere is None  # else `found` copies what it is given
        for path, leaf in leaves_with_paths(flatten_dataclasses(run())):
            found[f"output{pytree.keystr(path)}"] = _kept(leaf, copy)
        for name, leaf in self.leaves.items():
            found[f"gradient of {name}"] = _kept(leaf.grad, False)
            if is_distributed(leaf):
                found[f"placements of the gradient of {name}"] = str(dtensor_layout(leaf.grad))
            if self.elsewhere:
                leaf.grad = None  # it would be there beside those that are compared
        for name, buffer in self.buffers.items():
            found[f"buffer {name}"] = _kept(buffer, copy)
        for written in self.attributes.written():
            for path, leaf in leaves_with_paths(written.value):
                if isinstance(leaf, Tensor):
                    found[f"attribute {written.text}{pytree.keystr(path)}"] = _kept(leaf, copy)
        for device in self.streams:
            name = STREAM if device == CPU else f"{STREAM} of {device}"
            found[name] = save_rng_state(device)
        return found


def _in_memory(tensor: Tensor) -> Read:
    copy = tensor.clone()
    return lambda: copy


def _kept(leaf: Any, copy: bool) -> Any:
    # On the host, so that outcomes take no room on a device.
    return local_part(leaf.detach()).to(CPU, copy=copy) if isinstance(leaf, Tensor) else leaf


SPLIT_FLOAT32, _SPLIT_HALF = 1e-5, 2e-2
"""For chunks whose sums have another order: how far a result may be from eager's, as a part of its
norm. The first is for steps in float32, the second where 16 bits are in use."""


Rounding = Literal["", "inductor", "chunks", "levers"]
"""What rounds otherwise than eager: Inductor's code, chunks that sum in another order, levers that
say so; or none."""


def rounding_of(module: nn.Module) -> Rounding:
    kind: Any = type(module)  # of its own, which holds the plan
    if not hasattr(kind, "_remat_compiled_step"):
        return ""
    if kind._remat_compiled_step.by_inductor:
        return "inductor"
    if kind._remat_schedule.is_exact:
        return ""
    return "chunks" if kind._remat_schedule.chunks else "levers"


def tolerance_of(module: nn.Module) -> float:
    rounding, kind = rounding_of(module), type(module)
    if rounding == "levers":
        return max(one.tolerance for one in kind._remat_schedule.levers)  # pyright: ignore
    if rounding != "chunks":
        return _TOLERANCE if rounding else 0.0
    is_half = any(is_on for _, is_on, _ in kind._remat_guards.recipe.autocast)  # pyright: ignore
    is_half |= any(parameter.itemsize < FLOAT32_BYTES for parameter in module.parameters())
    return _SPLIT_HALF if is_half else SPLIT_FLOAT32
