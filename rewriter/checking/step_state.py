"""All that a training step changes, put back so that each run starts from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, MutableMapping
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.devices.device_table import CPU
from remat.graph_capture.devices.meter import Run
from remat.graph_capture.over_ranks.dtensors import is_distributed, local_part, placed
from remat.graph_capture.python_state.tensor_attributes import with_attributes_of
from remat.graph_capture.python_state.watch import PythonState
from remat.graph_capture.tracing.paths import leaves_with_paths
from remat.graph_capture.tracing.records import opened
from remat.graph_capture.tracing.untouched import ModuleAttributes
from remat.rewriter.checking.elsewhere import Elsewhere, Read
from remat.rewriter.checking.outcomes import Outcome
from remat.rewriter.graphs.rng_states import save_rng_state, set_rng_state

STREAM = "random stream"
Measure = TypeVar("Measure")


class OwnBatch:
    """A batch for each run: the user's tensors, cut off from the graphs that made them.

    Backward ends at it, and a forward that takes a list apart takes apart a list of its own. The
    storages are the user's, since copies would count in the peak.
    """

    def __init__(self, batch: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(batch)
        own: dict[int, Tensor] = {}
        self.leaves = [_cut_off(leaf, own) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._asked = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]

    def __call__(self) -> Any:
        """(args, kwargs, target) in containers of their own."""
        for leaf, asked in zip(self.leaves, self._asked, strict=True):
            if isinstance(leaf, Tensor) and leaf.requires_grad is not asked:
                leaf.requires_grad_(asked)
        return pytree.tree_unflatten(self.leaves, self._spec)


def _cut_off(tensor: Tensor, own: dict[int, Tensor]) -> Tensor:
    """The tensor without its history. Autograd saves none of inference mode, so those are copied.

    A tensor that is given twice stays one.

    Parameters
    ----------
    own : the copies that were made, by the tensors' identities.
    """
    if id(tensor) not in own:
        with torch.inference_mode(False):
            cut = (tensor.clone() if tensor.is_inference() else tensor).detach()
            own[id(tensor)] = with_attributes_of(tensor, cut.requires_grad_(tensor.requires_grad))
    return own[id(tensor)]


@contextlib.contextmanager
def own_parameters(*models: nn.Module) -> Generator[None]:
    """Other parameters over the same storages meanwhile: without hooks, and without gradients.

    So a hook that steps an optimizer in backward does not run, and no gradient of the user's is
    added to. Tied ones stay tied, as do those that the models share.
    """
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
    """Gradients, buffers, the batch and the random streams as they were.

    Parameters
    ----------
    device : where the step runs. Its random stream is kept beside the CPU's.
    python_state : what forward and the loss read, and may change.
    keep_parameters : whether forward may write to parameters too, as a momentum encoder's does.
    elsewhere : where copies of all that and the outcomes are kept; None for memory.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        device: str,
        python_state: PythonState | None = None,
        *,
        keep_parameters: bool = False,
        elsewhere: Elsewhere | None = None,
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
        """Leave everything as it was, gradients too."""
        try:
            yield
        finally:
            self.reset()
            for name, leaf in self.leaves.items():
                leaf.grad = self.gradients[name]

    def reset(self) -> None:
        """Back to the start of a step, without gradients and without what autocast has cast."""
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

    def prepared(self, run: Callable[[], Measure], accumulate: bool) -> Measure:
        """What `run` returns from the start of a step; with zeros as gradients if `accumulate`."""
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
        for path, leaf in leaves_with_paths(opened(run())):
            found[f"output{pytree.keystr(path)}"] = _kept(leaf, copy)
        for name, leaf in self.leaves.items():
            found[f"gradient of {name}"] = _kept(leaf.grad, False)
            if is_distributed(leaf):
                found[f"placements of the gradient of {name}"] = str(placed(leaf.grad))
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
    """The leaf on the host, so that outcomes take no room on a device."""
    return local_part(leaf.detach()).to(CPU, copy=copy) if isinstance(leaf, Tensor) else leaf
