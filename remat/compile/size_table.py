"""Plans for the sizes that come to one graph of dynamo's whose sizes are symbols.

Dynamo's guards stay symbolic, so it compiles once. Each size is planned when it first comes, as
dynamo itself would have it planned if that shape were the only one: the same plan, the same code.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from remat.compile.one_shape import numbered, symbols_of

MOST_SIZES = 16
"""Sizes whose code is kept; of those beyond, what was not used for longest goes."""
WAY_OUT = (
    'remat.plan_cache(model, budget=..., dynamic="auto") makes one plan for a range of sizes, '
    "without Inductor's code"
)
Compiled = Callable[..., Any]
CompileOne = Callable[[fx.GraphModule, Sequence[Any], int, str], Compiled]
"""Compiles a graph of one shape on fake inputs; takes the number and the name of its sizes too."""


class SizeTable:
    """Runs a graph at any size; plans for a size when it first comes.

    Parameters
    ----------
    gm : whose inputs have symbolic sizes, or are symbols. most : sizes that are kept.
    """

    def __init__(self, gm: fx.GraphModule, compile_one: CompileOne, most: int = MOST_SIZES) -> None:
        self._gm, self._compile_one, self._most = gm, compile_one, most
        self._symbols = symbols_of(gm)
        n_inputs = len(gm.graph.find_nodes(op="placeholder"))
        self._others = [i for i in range(n_inputs) if i not in self._symbols]
        self._compile_id = CompileContext.current_compile_id()
        self._calls: OrderedDict[tuple[float, ...], Compiled] = OrderedDict()
        self._numbers: dict[tuple[float, ...], int] = {}
        self._has_told_of_dropping = False

    def __call__(self, *args: Any) -> Any:
        """Run the graph; its inputs as dynamo passes them."""
        sizes = tuple(_number(args[i]) for i in self._symbols)
        call = self._calls.get(sizes)
        if call is None:
            call = self._calls[sizes] = self._planned(sizes, args)
            self._keep_few()
        self._calls.move_to_end(sizes)
        return call(*[args[i] for i in self._others])

    def _planned(self, sizes: tuple[float, ...], args: Sequence[Any]) -> Compiled:
        """The code for sizes that come for the first time, or that were dropped.

        Dynamo restores the random stream around its compilations, and closes what traces itself.
        This runs between steps, so the same is done here.
        """
        number = self._numbers.setdefault(sizes, len(self._numbers))
        if number == 1:
            self._warn_of_planning(sizes)
        numbers = dict(zip(self._symbols, sizes, strict=True))
        devices = {t.device.index for t in args if isinstance(t, Tensor) and t.is_cuda}
        with _disable_current_modes(), torch.random.fork_rng(sorted(devices)):
            gm, inputs = numbered(self._gm, numbers, args)
            with (
                tracing(TracingContext(_mode_of(inputs))),
                compile_context(CompileContext(self._compile_id)),
            ):
                return self._compile_one(gm, inputs, number, self._text(sizes))

    def _text(self, sizes: Sequence[float]) -> str:
        """Sizes by name, ``dimension 1 of tokens = 48``."""
        named = zip(self._symbols.values(), sizes, strict=True)
        return ", ".join(f"{name} = {size}" for name, size in named)

    def _warn_of_planning(self, sizes: tuple[float, ...]) -> None:
        first = next(iter(self._numbers))
        names = self._symbols.values()
        changed = [
            f"{name} was {was} and is {size}"
            for name, was, size in zip(names, first, sizes, strict=True)
            if was != size
        ]
        warnings.warn(
            f"{', '.join(changed)}: under torch.compile each size is planned when it first comes, "
            f"and the code for {self._most} is kept. {WAY_OUT}",
            stacklevel=4,
        )

    def _keep_few(self) -> None:
        if len(self._calls) <= self._most:
            return
        self._calls.popitem(last=False)
        if not self._has_told_of_dropping:
            self._has_told_of_dropping = True
            warnings.warn(
                f"{len(self._numbers)} sizes have come, and the code for {self._most} is kept, so "
                "that sizes that come again may be planned again. Pad batches to fewer sizes. "
                f"{WAY_OUT}",
                stacklevel=4,
            )


def _number(given: Any) -> float:
    """A number as it is; dynamo passes a float as a tensor of no dimension."""
    return given.item() if isinstance(given, Tensor) else given


def _mode_of(inputs: Sequence[Any]) -> Any:
    return next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
