"""Costs of a compiled step: calls as measured, kernels by what they move and compute."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from remat.graph_capture.costs.cache import CostCache, OpCost, WholeStepTimes, moved_bytes
from remat.graph_capture.costs.op_costs import ESTIMATED_BYTES_PER_US, with_cost
from remat.graph_capture.costs.op_times import KernelError, cost_key, runner_of, times_us
from remat.graph_capture.costs.step_time import bytes_for_backward, calibrated
from remat.graph_capture.devices.known_devices import allocator_rounding, is_cuda
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.devices.meter import CpuMeter, Meter
from remat.graph_capture.devices.placement import meter_of
from remat.graph_capture.distributed.collectives import run_locally
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.nodes import aten, fresh_storages, node_inputs, tensors_of
from remat.graph_capture.torch_private.core import (
    FakeTensorMode,
    TracingContext,
    disable_current_modes,
    no_python_dispatcher,
    tracing,
    unset_fake_temporarily,
)
from remat.graph_capture.torch_private.inductor import (
    compile_fx_inner,
    inductor_config,
    inductor_prims,
)
from remat.rewriter.inductor.fused_graph import FusedJoint
from remat.rewriter.inductor.fused_nodes import (
    CONVERT,
    SEEDED_DRAWS,
    is_added_product,
    is_generated,
    is_inlined,
    is_reduction,
    shares_storage,
)

# On a CPU a random number takes some twenty times as long as other arithmetic, an error function
# five times. A GPT-2 plan with an overhead of 0.7 % took 3.8 % before that counted. Each function
# is measured once a machine, by a kernel with it beside one without.

_FUNCTIONS: dict[Any, str] = {
    getattr(aten, name).default: name
    for name in (
        "cos", "erf", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "sin",
        "tanh",
    )
}  # fmt: skip
_TARGETS = {name: target for target, name in _FUNCTIONS.items()}
DRAW, BYTE = "draw", "byte"
KEY = "remat.element"
ELEMENTS = 1 << 20  # what the measured kernels compute: enough to keep every thread busy


def slow_part(node: fx.Node) -> str:
    """What `node` computes that costs time by the element; empty if it is as fast as a copy."""
    if node.target in SEEDED_DRAWS:
        return DRAW
    if node.target == CONVERT:
        # Reading a mask that is kept as bytes costs time by the element too.
        read = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
        is_byte = any(tensor is not None and tensor.dtype == torch.uint8 for tensor in read)
        return BYTE if is_byte else ""
    return _FUNCTIONS.get(node.target, "")


def _element_key(part: str) -> str:
    return f"{KEY} {part}"


def us_per_element(parts: Iterable[str], cache: CostCache) -> dict[str, float]:
    """Microseconds that each `slow_part` takes, with the threads that there are now."""
    keys = {part: _element_key(part) for part in sorted(parts)}
    if missing := [part for part, key in keys.items() if key not in cache.costs]:
        meter = CpuMeter()
        with for_real(meter):  # it may be called in the middle of a compilation
            # Beside a kernel without it, since what else an element costs is counted as bytes.
            without_us, *found_us = meter.often_us(*map(_kernel, ("", *missing)))
        for part, with_it_us in zip(missing, found_us, strict=True):
            cache.costs[keys[part]] = OpCost(max(0.0, with_it_us - without_us), 0)
        cache.save()
    return {part: cache.costs[key].cost_us / ELEMENTS for part, key in keys.items()}


def _kernel(part: str) -> Callable[[], Any]:
    seeds, mask = torch.zeros(1, dtype=torch.int64), torch.ones(ELEMENTS, dtype=torch.uint8)
    given = [seeds, torch.linspace(0.5, 2.0, ELEMENTS), mask]
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in given]
    with tracing(TracingContext(mode)), inductor_config.patch(fx_graph_cache=False):
        run: Any = compile_fx_inner(_graph(part, fake, mode), fake)

    def once() -> Any:
        return run(list(given))  # compiled code empties its list

    once()
    return once


def _graph(part: str, fake: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    graph = fx.Graph()
    seeds, numbers, mask = map(graph.placeholder, ("seeds", "numbers", "mask"))
    factor: Any = 1.5
    if part == DRAW:
        seed = graph.call_function(inductor_prims.lookup_seed, (seeds, 0))
        factor = graph.call_function(inductor_prims.random, ([ELEMENTS], seed, "rand"))
    elif part == BYTE:
        factor = graph.call_function(CONVERT, (mask, torch.float32))
    elif part:
        factor = graph.call_function(_TARGETS[part], (numbers,))
    graph.output((graph.call_function(aten.mul.Tensor, (numbers, factor)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fake)
    return gm


_BANDWIDTH_KEY = "remat.copy_bandwidth"
_BANDWIDTH_BYTES = 1 << 25  # copied to measure: most to memory, not caches
_ON_CUDA_BYTES, _ON_CUDA_PART = 1 << 30, 8  # there so much, or one part in so many of what is free
_LAUNCH_KEY = "remat.launch"  # of a kernel that moves a byte
LEAST_SLOW_ELEMENTS = 1 << 12  # fewer are not worth the seconds of a measurement
NEAR = 0.8
"""Part of the time to read a result that is saved while it is near the core, as it is just after it
was computed. With 0, plans took up to 3.3 % less than planned (Llama), with 1 up to 1.9 % more
(GPT-2); what is left is mostly arithmetic (`us_per_element`)."""


class CallCosts:
    """Time and workspace of calls. Each distinct call is measured once and kept on disk."""

    def __init__(self, constants: Any, device: str) -> None:
        self.constants = constants
        self.meter = meter_of(device)
        self.cache = CostCache.of(self.meter)
        self._taken: set[str] = set()

    def taken(self) -> dict[str, OpCost]:
        return {key: self.cache.costs[key] for key in sorted(self._taken)}

    def of(self, nodes: Iterable[fx.Node]) -> list[OpCost]:
        asked = list(nodes)
        keys = [cost_key(node) for node in asked]
        if missing := {k: n for k, n in zip(keys, asked, strict=True) if k not in self.cache.costs}:
            with for_real(self.meter):
                self.cache.costs.update(self._measured(missing))
            self.cache.save()
        self._taken.update(keys)
        return [self.cache.costs[key] for key in keys]

    def bytes_per_us(self) -> float:
        if _BANDWIDTH_KEY not in self.cache.costs:
            size_bytes, device = _BANDWIDTH_BYTES, self.meter.device
            if is_cuda(device):
                size_bytes = min(_ON_CUDA_BYTES, free_bytes(device) // _ON_CUDA_PART)
            copy_us = self._copy_us(size_bytes) - self.launch_us()
            self._keep(_BANDWIDTH_KEY, copy_us * _BANDWIDTH_BYTES / size_bytes)
        self._taken.add(_BANDWIDTH_KEY)
        return 2 * _BANDWIDTH_BYTES / self.cache.costs[_BANDWIDTH_KEY].cost_us  # read and written

    def launch_us(self) -> float:
        """What a kernel takes beside its bytes; nothing on a CPU, where it is a call."""
        if not is_cuda(self.meter.device):
            return 0.0
        if _LAUNCH_KEY not in self.cache.costs:
            self._keep(_LAUNCH_KEY, self._copy_us(1))
        self._taken.add(_LAUNCH_KEY)
        return self.cache.costs[_LAUNCH_KEY].cost_us

    def _keep(self, key: str, cost_us: float) -> None:
        self.cache.costs[key] = OpCost(cost_us)
        self.cache.save()

    def _copy_us(self, size_bytes: int) -> float:
        with for_real(self.meter):
            # To memory that is there already: new pages make a copy five times slower.
            source = torch.ones(size_bytes, dtype=torch.uint8, device=self.meter.device)
            target = torch.ones_like(source)
            (copy_us,) = self.meter.often_us(lambda: target.copy_(source))
        return copy_us

    def us_per_element(self, parts: Collection[str]) -> dict[str, float]:
        if is_cuda(self.meter.device):  # its kernels wait for memory
            return dict.fromkeys(parts, 0.0)
        found = us_per_element(parts, self.cache)
        self._taken.update(map(_element_key, parts))
        return found

    def _measured(self, missing: dict[str, fx.Node]) -> dict[str, OpCost]:
        found: dict[str, OpCost] = {}
        moved = {key: moved_bytes(node) for key, node in missing.items()}
        allocated = allocator_rounding(self.meter.device)

        def failed(key: str, _: KernelError) -> None:
            found[key] = OpCost(moved[key] / ESTIMATED_BYTES_PER_US, 0, is_estimate=True)

        made = {key: partial(runner_of, node, self.constants) for key, node in missing.items()}
        costs = times_us(made, moved, self.meter, failed, first=lambda _, run: run_locally(run))
        memory = self.meter.regions(runner_of(missing[key], self.constants) for key in costs)
        for (key, (cost_us, away, queue_us)), region in zip(costs.items(), memory, strict=True):
            made_bytes = sum(map(allocated, fresh_storages(missing[key])))
            # Results are values of the graph, not workspace.
            beyond_bytes = max(0, region.peak_bytes - made_bytes)
            found[key] = OpCost(cost_us, beyond_bytes, away=away, queue_us=queue_us)
        return found


@contextlib.contextmanager
def for_real(meter: Meter) -> Generator[None]:
    with (
        no_python_dispatcher(), disable_current_modes(), unset_fake_temporarily(), meter.quiet()
    ):  # fmt: skip
        yield


def with_kernel_costs(joint: FusedJoint, costs: CallCosts) -> TrainingGraph:
    calls = {name: n for name, n in joint.node_of_op.items() if not is_generated(n)}
    found = dict(zip(calls, costs.of(calls.values()), strict=True))
    bytes_per_us, launch_us = costs.bytes_per_us(), costs.launch_us()
    stored, values = set(joint.node_of_op.values()), joint.graph.value_by_name
    kernels = {name: n for name, n in joint.node_of_op.items() if name not in found}
    slow = {name: _slow_elements(node, stored) for name, node in kernels.items()}
    element_us = costs.us_per_element(set[str]().union(*slow.values()))
    ops: list[Op] = []
    for op in joint.graph.ops:
        node = joint.node_of_op.get(op.name)
        if op.name in found:
            op = with_cost(op, found[op.name])
        elif node is not None:
            # Reads and writes at the rate of a copy, plus slow functions; inlined ones are free.
            cost_us = _kernel_bytes(op, node, values) / bytes_per_us
            cost_us += sum(n * element_us[part] for part, n in slow[op.name].items())
            cost_us += 0.0 if is_added_product(node) else launch_us
            op = msgspec.structs.replace(op, cost_us=cost_us, cost_origin="modelled")
        ops.append(op)
    costed = msgspec.structs.replace(joint.graph, ops=tuple(ops), cost_origin="mixed")
    # Recomputed values are near when read: `NEAR` of that time is taken off, added to the step.
    read_us = sum(bytes_for_backward(costed).values()) / bytes_per_us
    return calibrated(costed, WholeStepTimes(step_us=0.0, keeping_us=NEAR * read_us))


def _kernel_bytes(op: Op, node: fx.Node, values: Mapping[str, Value]) -> int:
    made = [tensor for tensor in tensors_of(node) if tensor is not None]
    total = sum(tensor.numel() * tensor.element_size() for tensor in made)
    if is_added_product(node):  # the call that multiplies writes the sum, and reads the other term
        return total
    written = max((tensor.numel() for tensor in made), default=0)
    for value in map(values.__getitem__, op.inputs):
        # A pointwise kernel reads of each value no more elements than it writes.
        most_bytes = written * getattr(torch, value.dtype).itemsize
        total += value.size_bytes if is_reduction(node) else min(value.size_bytes, most_bytes)
    return total


def _slow_elements(node: fx.Node, stored: set[fx.Node]) -> Counter[str]:
    found, stack, elements = {node}, [node], Counter[str]()
    while stack:
        at = stack.pop()
        made = sum(t.numel() for t in tensors_of(at) if t is not None)
        if made >= LEAST_SLOW_ELEMENTS and (part := slow_part(at)):
            elements[part] += made
        for source in node_inputs(at):
            is_part = source not in stored and (is_inlined(source) or shares_storage(source))
            if is_part and source not in found:  # counts in both readers, though made once
                found.add(source)
                stack.append(source)
    return elements
