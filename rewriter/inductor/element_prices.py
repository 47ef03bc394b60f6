"""What an element costs in a kernel that Inductor generates, beyond the bytes read and written.

On a CPU a random number takes some twenty times as long as other arithmetic, and an error function
five times. So they set the price of a dropout or a GELU that is computed again: a GPT-2 plan whose
overhead was predicted at 0.7 % took 3.8 %, since eight GELUs and the masks of eight dropouts took
11.6 ms and were priced at 2.5. Each function is measured once a machine, by a kernel with it beside
one without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

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

from remat.graph_capture.devices.cpu_meter import CpuMeter
from remat.graph_capture.joint.nodes import tensors_of
from remat.graph_capture.prices.price_cache import Price, PriceCache
from remat.rewriter.inductor.nodes import DRAWS

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
