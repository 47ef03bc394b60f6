"""Proof by running: the rewritten module against the original, bit for bit."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from remat.graph_capture.memory_events import measure_peak
from remat.graph_capture.resident import Optimizer, resident_bytes
from remat.graph_capture.step import LossFunction, apply_loss
from remat.graph_capture.untouched import untouched
from remat.rewriter.guards import constants_of
from remat.rewriter.module import RematModule
from remat.rewriter.shared_state import SharedState

Run = Callable[[], Any]

ENOUGH_NS = 20_000_000_000


class Check(msgspec.Struct, frozen=True):
    """What `check` found.

    Attributes
    ----------
    outputs_equal, gradients_equal, buffers_equal, rng_equal : bit for bit, against eager.
    gradients, gradients_total : how many gradients are bit-identical, of how many.
    baseline_peak_bytes, plan_peak_bytes : measured peak of the unmodified and of the
        rewritten step, resident bytes included.
    baseline_step_us, plan_step_us : median time of a step.
    differences : names of what differs.
    """

    outputs_equal: bool
    gradients_equal: bool
    buffers_equal: bool
    rng_equal: bool
    gradients: int
    gradients_total: int
    baseline_peak_bytes: int
    plan_peak_bytes: int
    baseline_step_us: float
    plan_step_us: float
    differences: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def overhead(self) -> float:
        """Measured time of the rewritten step over the unmodified one's, minus one."""
        return self.plan_step_us / self.baseline_step_us - 1


def check(
    model: nn.Module,
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: Optimizer = "none",
    accumulate: bool = False,
    steps: int = 5,
) -> Check:
    """Run a training step of both on the same batch and random state, and compare.

    Both run once for equality, once under the profiler for the peak, and `steps` times
    in turn for the time, or fewer once that has taken 20 s. Gradients, buffers, the batch
    and the random stream are put back as they were.

    Parameters
    ----------
    model, module : the original and the rewritten module.
    args, kwargs, loss_fn, target, optimizer, accumulate : as given to `capture`.
    """
    batch = (tuple(args), dict(kwargs or {}), target)
    eager = _eager_run(model, batch, loss_fn)
    plan = _plan_run(module, batch, loss_fn)
    state = _State(model, batch)
    kept = (batch, _constants(module))
    resident = resident_bytes(model, kept, optimizer=optimizer, accumulate=accumulate)
    with untouched(model, warn=False), state.put_back():
        expected, found = state.outcome(eager), state.outcome(plan)
        peaks = [
            state.prepared(lambda run=run: measure_peak(run), accumulate) for run in (eager, plan)
        ]
        times = _step_times(state, eager, plan, accumulate, steps)
    differences = [name for name in expected if not _same(expected[name], found[name])]
    gradients = [name for name in expected if name.startswith("gradient of ")]
    return Check(
        outputs_equal=not any(name.startswith("output") for name in differences),
        gradients_equal=not any(name.startswith("gradient of ") for name in differences),
        buffers_equal=not any(name.startswith("buffer ") for name in differences),
        rng_equal="random stream" not in differences,
        gradients=sum(name not in differences for name in gradients),
        gradients_total=len(gradients),
        baseline_peak_bytes=resident.total_bytes + peaks[0],
        plan_peak_bytes=resident.total_bytes + peaks[1],
        baseline_step_us=times[0],
        plan_step_us=times[1],
        differences=tuple(differences),
    )


def _constants(module: nn.Module) -> list[Tensor]:
    if isinstance(module, RematModule):
        return constants_of(module.forward_module, module.backward_module)
    return []


def _eager_run(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> Run:
    args, kwargs, target = batch

    def run() -> Any:
        output = apply_loss(loss_fn, model(*args, **kwargs), target)
        _backward(output)
        return output

    return run


def _plan_run(module: nn.Module, batch: Any, loss_fn: LossFunction | None) -> Run:
    if not isinstance(module, SharedState):
        return _eager_run(module, batch, loss_fn)
    args, kwargs, target = batch
    if loss_fn is not None and target is not None:
        kwargs = {**kwargs, "target": target}

    def run() -> Any:
        output = module(*args, **kwargs)
        _backward(output)
        return output

    return run


def _backward(output: Any) -> None:
    """Backward from every differentiable leaf; made gradients where it is no scalar.

    Outside autocast, where torch's documentation wants it.
    """
    roots = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    generator = torch.Generator(device=roots[0].device).manual_seed(0)
    tangents = [
        None
        if root.numel() == 1
        else torch.randn(root.shape, dtype=root.dtype, device=root.device, generator=generator)
        for root in roots
    ]
    with torch.autocast(roots[0].device.type, enabled=False):
        torch.autograd.backward(roots, tangents)


class _State:
    """All that a step changes, remembered so that each run starts from the same place."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model = model
        self.batch = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        self.buffers = dict(model.named_buffers())
        self.leaves = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.leaves |= {
            f"input {i}": t for i, t in enumerate(self.batch) if t.is_leaf and t.requires_grad
        }
        tensors = [*self.buffers.values(), *self.batch]
        self.before = [(t, t.detach().clone()) for t in tensors]
        self.gradients = {name: leaf.grad for name, leaf in self.leaves.items()}
        self.rng = torch.get_rng_state()

    @contextlib.contextmanager
    def put_back(self) -> Generator[None]:
        try:
            yield
        finally:
            self.reset()
            for name, leaf in self.leaves.items():
                leaf.grad = self.gradients[name]

    def reset(self) -> None:
        with torch.no_grad():
            for tensor, value in self.before:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        torch.set_rng_state(self.rng)
        for leaf in self.leaves.values():
            leaf.grad = None

    def prepared(self, run: Callable[[], int], accumulate: bool) -> int:
        self.reset()
        if accumulate:
            for leaf in self.leaves.values():
                leaf.grad = torch.zeros_like(leaf)
        return run()

    def outcome(self, run: Run) -> dict[str, Tensor | None]:
        """Every output, gradient and buffer after one step, by name, and the stream."""
        self.reset()
        found: dict[str, Any] = {}
        for path, leaf in pytree.tree_flatten_with_path(run())[0]:
            found[f"output{pytree.keystr(path)}"] = (
                leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            )
        for name, leaf in self.leaves.items():
            found[f"gradient of {name}"] = leaf.grad
        for name, buffer in self.buffers.items():
            found[f"buffer {name}"] = buffer.detach().clone()
        found["random stream"] = torch.get_rng_state()
        return found


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        return torch.equal(expected, found) or torch.equal(_bits(expected), _bits(found))
    return expected is found or bool(expected == found)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, by which NaNs compare as equal."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _step_times(
    state: _State, eager: Run, plan: Run, accumulate: bool, steps: int
) -> tuple[float, float]:
    """Median step times in microseconds, the two in turn so that drift hits both."""

    def timed(run: Run) -> int:
        start = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - start

    times: list[list[int]] = []
    while len(times) < steps and sum(map(sum, times)) < ENOUGH_NS:
        times.append([state.prepared(lambda r=r: timed(r), accumulate) for r in (eager, plan)])
    eager_ns, plan_ns = zip(*times, strict=True)
    return statistics.median(eager_ns) / 1e3, statistics.median(plan_ns) / 1e3
