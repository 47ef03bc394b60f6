"""One row of `benchmarks.compiled`, in a process of its own: example, kind, amount.

Kinds: ``ours`` at a percentage of the compiled peak, ``stock`` at a memory budget of torch's, and
``beside``: ours at the peak that was measured of stock at that memory budget.
"""

from __future__ import annotations

import copy
import json
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from torch import Tensor

import remat
from benchmarks.cell import cpu_name
from benchmarks.comparison.methods import KeepAll
from benchmarks.comparison.row import error, ratio
from benchmarks.compiled import CHANNELS_LAST, ROOT, STEPS, WITHOUT_DROPOUT
from remat.graph_capture.devices.memory_events import measure_peak


class Example:
    """A model of examples/ with its batch and loss."""

    def __init__(self, name: str) -> None:
        made = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["factory"]()
        self.model, self.args = made["model"], made["args"]
        self.loss_fn, self.target = made.get("loss_fn"), made.get("target")
        if name in CHANNELS_LAST:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.args = tuple(a.contiguous(memory_format=torch.channels_last) for a in self.args)

    def step(self, compiled: Callable[..., Any]) -> None:
        """One training step."""
        output = compiled(*self.args)
        loss = self.loss_fn(output, self.target) if self.loss_fn else output
        loss.backward()

    def gradients(self, compiled: Callable[..., Any]) -> list[Tensor]:
        """Of a step from a fixed random state."""
        self.model.zero_grad()
        torch.manual_seed(3)
        self.step(compiled)
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return found

    def peak_bytes(self, compiled: Callable[..., Any]) -> int:
        """Measured, with parameters, buffers and the batch."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *pytree.tree_leaves(self.args)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) + measure_peak(lambda: self.step(compiled))

    def step_times(self, *compiled: Callable[..., Any]) -> list[list[float]]:
        """Processor seconds of steps of each, in turn so that drift hits all."""
        times: list[list[float]] = [[] for _ in compiled]
        for _ in range(STEPS):
            for taken, one in zip(times, compiled, strict=True):
                self.model.zero_grad()
                start = time.process_time()
                self.step(one)
                taken.append(time.process_time() - start)
        return times

    def in_double(self) -> list[Tensor]:
        """Gradients of an eager step in float64: the truth, where nothing is random."""
        double = copy.deepcopy(self)
        double.model = double.model.double()
        is_float = torch.is_floating_point
        double.args = pytree.tree_map(lambda t: t.double() if is_float(t) else t, self.args)
        return double.gradients(double.model)


def stock(model: Any, **patches: Any) -> Callable[..., Any]:
    """As Inductor compiles it; never from a cache, which holds other partitions."""
    return torch.compile(model, options={"fx_graph_cache": False, **patches})


def with_stock_budget(example: Example, share: float) -> tuple[Callable[..., Any], list[Tensor]]:
    """The model as torch compiles it at a memory budget, and its gradients."""
    with functorch_config.patch(activation_memory_budget=share):
        compiled = stock(example.model)
        return compiled, example.gradients(compiled)


def with_ours(
    example: Example, budget: str | int
) -> tuple[Callable[..., Any], list[Tensor], dict[str, Any]]:
    """The model compiled under a budget, its gradients, and what the plan says."""
    compiled = torch.compile(example.model, backend="remat", options={"budget": budget})
    gradients = example.gradients(compiled)
    plan = remat.compiled_plans()[-1]
    said = {
        "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes,
        "overhead": plan.overhead, "gap": plan.gap, "replays": plan.replays,
        "search_s": plan.seconds, "recomputed": plan.recomputed,
    }  # fmt: skip
    return compiled, gradients, said


def measured(example: Example, name: str, kind: str, amount: float) -> dict[str, Any]:
    """The row."""
    facts: dict[str, Any] = {"cpu": cpu_name(), "torch": str(torch.__version__)}
    kept = stock(example.model, custom_partitioner_fn=KeepAll())
    expected = example.gradients(kept)
    steps = [kept]
    budget: str | int = f"{amount}%"
    if kind != "ours":
        compiled, gradients = with_stock_budget(example, amount)
        steps.append(compiled)
    if kind == "beside":
        budget = facts["stock_peak_bytes"] = example.peak_bytes(compiled)
        facts["stock_gradient_error"] = error(gradients, expected)
    if kind != "stock":
        compiled, gradients, said = with_ours(example, budget)
        steps.append(compiled)
        facts |= said
    times = example.step_times(*steps)
    facts |= {
        "gradient_error": error(gradients, expected), "peak_bytes": example.peak_bytes(compiled),
        "step_s": statistics.median(times[-1]), "kept_step_s": statistics.median(times[0]),
    }  # fmt: skip
    if kind == "beside":
        facts["stock_step_s"] = statistics.median(times[1])
        facts["over_stock"] = ratio(times[-1], times[1]) - 1
    if name in WITHOUT_DROPOUT:
        true = example.in_double()
        facts |= {"true_error": error(gradients, true), "kept_error": error(expected, true)}
    return facts


def main() -> int:
    """Print what was measured as one line of JSON."""
    name, kind, amount = sys.argv[1], sys.argv[2], float(sys.argv[3])
    torch.set_num_threads(1)
    example = Example(name)
    with functorch_config.patch(enable_autograd_cache=False):
        print(json.dumps(measured(example, name, kind, amount)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
