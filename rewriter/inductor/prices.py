"""Prices of a compiled step: calls as measured, kernels by what they move and compute."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes

from remat.graph_capture.devices.cpu import CpuMeter
from remat.graph_capture.devices.here import meter_of
from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.devices.table import allocated_on, is_cuda
from remat.graph_capture.distributed.collectives import on_this_rank
from remat.graph_capture.distributed.fake_group import alone
from remat.graph_capture.graph import Op, TrainingGraph, Value
from remat.graph_capture.joint.nodes import fresh_storages, node_inputs, tensors_of
from remat.graph_capture.prices.cache import Price, PriceCache, WholeStep
from remat.graph_capture.prices.op_times import Failure, price_key, sample_arguments, times_us
from remat.graph_capture.prices.pricing import ESTIMATED_BYTES_PER_US
from remat.graph_capture.prices.profile import moved_bytes
from remat.graph_capture.prices.step_time import booked, bytes_for_backward
from remat.rewriter.inductor.graph import FusedJoint, is_added_product
from remat.rewriter.inductor.nodes import DRAWS, is_generated, is_inlined, is_reduction, is_view

# What an element costs in a kernel that Inductor generates, beyond the bytes read and written.
#
# On a CPU a random number takes some twenty times as long as other arithmetic, and an error
# function five times. So they set the price of a dropout or a GELU that is computed again: a GPT-2
# plan whose overhead was predicted at 0.7 % took 3.8 %, since eight GELUs and the masks of eight
# dropouts took 11.6 ms and were priced at 2.5. Each function is measured once a machine, by a
# kernel with it beside one without.


aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default
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
ELEMENTS = 1 << 20
"""What the measured kernels compute: enough to keep every thread busy."""


def slow_part(node: fx.Node) -> str:
    """What `node` computes that is priced by the element; empty if it is as fast as a copy.

    Reading a mask that is kept as bytes is priced by the element too.
    """
    if node.target in DRAWS:
        return DRAW
    if node.target == _CONVERT:
        read = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
        is_byte = any(tensor is not None and tensor.dtype == torch.uint8 for tensor in read)
        return BYTE if is_byte else ""
    return _FUNCTIONS.get(node.target, "")


def element_key(part: str) -> str:
    """Under which the price of a `slow_part` is kept."""
    return f"{KEY} {part}"


def us_per_element(parts: Iterable[str], cache: PriceCache) -> dict[str, float]:
    """Microseconds that each `slow_part` takes, with the threads that there are now.

    What is missing is measured together and kept in `cache`, whose file is for this machine and
    this number of threads. It may be called in the middle of a compilation.
    """
    keys = {part: element_key(part) for part in sorted(parts)}
    missing = [part for part, key in keys.items() if key not in cache.prices]
    if missing:
        with _on_its_own():
            without_us, *found_us = CpuMeter().often_us(*map(_kernel, ("", *missing)))
        for part, with_it_us in zip(missing, found_us, strict=True):
            cache.prices[keys[part]] = Price(max(0.0, with_it_us - without_us), 0)
        cache.save()
    return {part: cache.prices[key].cost_us / ELEMENTS for part, key in keys.items()}


def _kernel(part: str) -> Callable[[], Any]:
    """A compiled kernel that multiplies `ELEMENTS` numbers by what is measured."""
    given = [
        torch.zeros(1, dtype=torch.int64),
        torch.linspace(0.5, 2.0, ELEMENTS),
        torch.ones(ELEMENTS, dtype=torch.uint8),
    ]
    mode = FakeTensorMode()
    fake = [mode.from_tensor(tensor) for tensor in given]
    with tracing(TracingContext(mode)), inductor_config.patch(fx_graph_cache=False):
        run: Any = compile_fx_inner(_graph(part, fake, mode), fake)

    def once() -> Any:
        return run(list(given))

    once()
    return once


@contextlib.contextmanager
def _on_its_own() -> Generator[None]:
    """Real tensors and plain kernels, whatever is being compiled around this."""
    with (
        no_python_dispatcher(), _disable_current_modes(), unset_fake_temporarily(), torch.no_grad()
    ):  # fmt: skip
        yield


def _graph(part: str, fake: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    graph = fx.Graph()
    seeds, numbers, mask = map(graph.placeholder, ("seeds", "numbers", "mask"))
    factor: Any = 1.5
    if part == DRAW:
        seed = graph.call_function(inductor_prims.lookup_seed, (seeds, 0))
        factor = graph.call_function(inductor_prims.random, ([ELEMENTS], seed, "rand"))
    elif part == BYTE:
        factor = graph.call_function(_CONVERT, (mask, torch.float32))
    elif part:
        factor = graph.call_function(_TARGETS[part], (numbers,))
    graph.output((graph.call_function(aten.mul.Tensor, (numbers, factor)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fake)
    return gm


BANDWIDTH_KEY = "remat.copy_bandwidth"
BANDWIDTH_BYTES = 1 << 25
"""Bytes of the copy whose rate is measured: so many that most go to memory, not to caches."""
LEAST_ELEMENTS = 1 << 12
"""With fewer elements, no slow part is worth the seconds that it takes to measure one."""
NEAR = 0.8
"""Part of the time to read a result from memory that is saved while it is near the core.

A result that was just computed is near the core when it is read; one that was kept is not.
Overheads of plans in %, as planned -> as taken by the code:

    plan                         NEAR = 0      NEAR = 1
    mixture of experts, 60 MB    9.2 -> 6.4    6.7 -> 7.2
    Llama, 62 MB                 4.5 -> 1.2    2.7 -> 1.0
    U-Net, 72 MB                 2.1 -> 0.3    1.1 -> 0.6
    GPT-2, 59 MB                 4.6 -> 3.8    2.9 -> 4.8

What was left was mostly arithmetic, which `element_prices` adds.
"""


class CallPrices:
    """Time and workspace of calls. Each distinct call is measured once and kept on disk.

    Parameters
    ----------
    constants : the module whose ``get_attr`` tensors the calls may read.
    device : on which the step runs.
    """

    def __init__(self, constants: Any, device: str) -> None:
        self.constants = constants
        self.meter = meter_of(device)
        self.cache = PriceCache.of(self.meter)
        self._taken: set[str] = set()

    def taken(self) -> dict[str, Price]:
        """All prices that were asked for, by their keys in the cache."""
        return {key: self.cache.prices[key] for key in sorted(self._taken)}

    def of(self, nodes: Iterable[fx.Node]) -> list[Price]:
        """Prices of `nodes`, in their order."""
        asked = list(nodes)
        keys = [price_key(node) for node in asked]
        missing = {k: n for k, n in zip(keys, asked, strict=True) if k not in self.cache.prices}
        if missing:
            with for_real(self.meter):
                self.cache.prices.update(self._measured(missing))
            self.cache.save()
        self._taken.update(keys)
        return [self.cache.prices[key] for key in keys]

    def bytes_per_us(self) -> float:
        """What a copy reads and writes in a microsecond here.

        It is a copy to memory that is there already. One to new memory is five times slower, for
        its pages.
        """
        if BANDWIDTH_KEY not in self.cache.prices:
            with for_real(self.meter):
                source = torch.ones(BANDWIDTH_BYTES, dtype=torch.uint8, device=self.meter.device)
                target = torch.ones_like(source)
                (copy_us,) = self.meter.often_us(lambda: target.copy_(source))
                self.cache.prices[BANDWIDTH_KEY] = Price(copy_us, 0)
            self.cache.save()
        self._taken.add(BANDWIDTH_KEY)
        return 2 * BANDWIDTH_BYTES / self.cache.prices[BANDWIDTH_KEY].cost_us

    def us_per_element(self, parts: Collection[str]) -> dict[str, float]:
        """What each slow part of a kernel that Inductor generates costs here.

        Nothing on a CUDA device, whose kernels wait for memory.
        """
        if is_cuda(self.meter.device):
            return dict.fromkeys(parts, 0.0)
        found = us_per_element(parts, self.cache)
        self._taken.update(map(element_key, parts))
        return found

    def _measured(self, missing: dict[str, fx.Node]) -> dict[str, Price]:
        found: dict[str, Price] = {}
        moved = {key: moved_bytes(node) for key, node in missing.items()}
        allocated = allocated_on(self.meter.device)

        def failed(key: str, _: Failure) -> None:
            found[key] = Price(moved[key] / ESTIMATED_BYTES_PER_US, 0, is_estimate=True)

        made = {key: partial(self._runner, node) for key, node in missing.items()}
        costs = times_us(made, moved, self.meter, failed, first=lambda _, run: alone(run))
        memory = self.meter.regions(self._runner(missing[key]) for key in costs)
        for (key, (cost_us, away)), region in zip(costs.items(), memory, strict=True):
            made_bytes = sum(map(allocated, fresh_storages(missing[key])))
            extra = max(0, region.peak_bytes - made_bytes)
            found[key] = Price(cost_us, extra, away=away)
        return found

    def _runner(self, node: fx.Node) -> Callable[[], Any]:
        args, kwargs = sample_arguments(node, self.constants)
        target = on_this_rank(node)
        return lambda: target(*args, **kwargs)


@contextlib.contextmanager
def for_real(meter: Meter) -> Generator[None]:
    """Real tensors and plain kernels, even in the middle of a compilation."""
    with (
        no_python_dispatcher(), _disable_current_modes(), unset_fake_temporarily(), meter.quiet()
    ):  # fmt: skip
        yield


def price_fused(joint: FusedJoint, prices: CallPrices) -> TrainingGraph:
    """The joint's graph with costs and workspaces.

    A call costs what it was measured to take. A kernel costs the time to read and write its values
    at the rate of a copy, and besides that the slow functions that it computes. What is inlined
    into it costs nothing more. What is computed again is near the core when it is read. So `NEAR`
    of the time to read it is taken off its price, and booked on the step.
    """
    calls = {name: n for name, n in joint.node_of_op.items() if not is_generated(n)}
    found = dict(zip(calls, prices.of(calls.values()), strict=True))
    bytes_per_us = prices.bytes_per_us()
    stored, values = set(joint.node_of_op.values()), joint.graph.value_by_name
    kernels = {name: n for name, n in joint.node_of_op.items() if name not in found}
    slow = {name: _slow_elements(node, stored) for name, node in kernels.items()}
    element_us = prices.us_per_element(set[str]().union(*slow.values()))
    ops: list[Op] = []
    for op in joint.graph.ops:
        node = joint.node_of_op.get(op.name)
        if op.name in found:
            op = _called(op, found[op.name])
        elif node is not None:
            cost_us = _kernel_bytes(op, node, values) / bytes_per_us
            cost_us += sum(n * element_us[part] for part, n in slow[op.name].items())
            op = msgspec.structs.replace(op, cost_us=cost_us, price="modelled")
        ops.append(op)
    priced = msgspec.structs.replace(joint.graph, ops=tuple(ops), prices="mixed")
    read_us = sum(bytes_for_backward(priced).values()) / bytes_per_us
    return booked(priced, WholeStep(step_us=0.0, keeping_us=NEAR * read_us))


def _called(op: Op, price: Price) -> Op:
    return msgspec.structs.replace(
        op,
        cost_us=price.cost_us,
        workspace_bytes=price.workspace_bytes,
        price="estimated" if price.is_estimate else "measured",
    )


def _kernel_bytes(op: Op, node: fx.Node, values: Mapping[str, Value]) -> int:
    """Bytes that a kernel reads and writes.

    A pointwise kernel reads of each value no more elements than it writes. A sum with a matrix
    product is written by the call that multiplies, which reads the other term.
    """
    made = [tensor for tensor in tensors_of(node) if tensor is not None]
    if is_added_product(node):
        return sum(tensor.numel() * tensor.element_size() for tensor in made)
    written = max((tensor.numel() for tensor in made), default=0)
    total = sum(tensor.numel() * tensor.element_size() for tensor in made)
    for value in map(values.__getitem__, op.inputs):
        most_bytes = written * getattr(torch, value.dtype).itemsize
        total += value.size_bytes if is_reduction(node) else min(value.size_bytes, most_bytes)
    return total


def _slow_elements(node: fx.Node, stored: set[fx.Node]) -> Counter[str]:
    """Elements of each slow part of the kernel of `node`, with what is inlined into it.

    What Inductor computes once for two readers is priced in both all the same.
    """
    found, stack, elements = {node}, [node], Counter[str]()
    while stack:
        at = stack.pop()
        made = sum(t.numel() for t in tensors_of(at) if t is not None)
        if made >= LEAST_ELEMENTS and (part := slow_part(at)):
            elements[part] += made
        for source in node_inputs(at):
            is_part = source not in stored and (is_inlined(source) or is_view(source))
            if is_part and source not in found:
                found.add(source)
                stack.append(source)
    return elements
