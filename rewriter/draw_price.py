"""What a random number costs in a kernel that Inductor generates, measured once on each machine.

On a CPU its generator takes some twenty times as long as other arithmetic on an element, so it sets
the price of a dropout that is computed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
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

from remat.graph_capture.meter import CpuMeter
from remat.graph_capture.price_cache import Price, PriceCache

DRAW_KEY = "remat.draw"
ELEMENTS = 1 << 20
"""Random numbers that the measured kernel draws: enough to keep every thread busy."""


def draw_us_per_element(cache: PriceCache) -> float:
    """Microseconds for a random number, with as many threads as there are now.

    Measured at the first call, by compiling a kernel that draws and one that only writes, and kept
    in `cache`, whose file is that of this machine and number of threads. May be called in the
    middle of a compilation.
    """
    if DRAW_KEY not in cache.prices:
        meter = CpuMeter()
        with _on_its_own():
            drawing, writing = (meter.often_us(_kernel(draws)) for draws in (True, False))
        cache.prices[DRAW_KEY] = Price(max(0.0, drawing - writing), 0)
        cache.save()
    return cache.prices[DRAW_KEY].cost_us / ELEMENTS


def _kernel(draws: bool) -> Callable[[], Any]:
    """A compiled kernel that writes `ELEMENTS` numbers, random ones or a constant."""
    seeds, mode = torch.zeros(1, dtype=torch.int64), FakeTensorMode()
    fake = mode.from_tensor(seeds)
    with tracing(TracingContext(mode)), inductor_config.patch(fx_graph_cache=False):
        run: Any = compile_fx_inner(_graph(draws, fake, mode), [fake])
    run([seeds])
    return lambda: run([seeds])


@contextlib.contextmanager
def _on_its_own() -> Generator[None]:
    """Real tensors and plain kernels, beside whatever is being compiled."""
    with (
        no_python_dispatcher(), _disable_current_modes(), unset_fake_temporarily(), torch.no_grad()
    ):  # fmt: skip
        yield


def _graph(draws: bool, seeds: torch.Tensor, mode: FakeTensorMode) -> fx.GraphModule:
    graph = fx.Graph()
    given = graph.placeholder("seeds")
    if draws:
        seed = graph.call_function(inductor_prims.lookup_seed, (given, 0))
        made = graph.call_function(inductor_prims.random, ([ELEMENTS], seed, "rand"))
    else:
        seed = graph.call_function(torch.ops.aten.select.int, (given, 0, 0))
        made = graph.call_function(torch.ops.aten.expand.default, (seed, [ELEMENTS]))
        made = graph.call_function(
            torch.ops.prims.convert_element_type.default, (made, torch.float32)
        )
    graph.output((made,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(seeds)
    return gm
