"""Backward graphs that are made by hand or at random."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
N = 4


class Backward:
    """Writes a backward graph whose inputs are square matrices, all but the last one saved."""

    def __init__(self, n_inputs: int, size: int = N) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.inputs = [
            self.graph.placeholder(f"saved_{i}" if i < n_inputs - 1 else "tangents_1")
            for i in range(n_inputs)
        ]
        with self.mode:
            for node in self.inputs:
                node.meta["val"] = torch.empty(size, size)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes: Any = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], args)
        with self.mode:
            node.meta["val"] = target(*fakes, **kwargs)
        return node

    def ending(self, results: Iterable[fx.Node | None]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        return fx.GraphModule(nn.Module(), self.graph)


def at_random(seed: int) -> tuple[fx.GraphModule, list[int]]:
    """Products, views, sums and writes in place, in any order; and which results are weights'."""
    rng, backward = random.Random(seed), Backward(4)
    made = list(backward.inputs)
    owned: list[fx.Node] = []
    for _ in range(rng.randint(4, 24)):
        one, other = rng.choice(made), rng.choice(made)
        kind = rng.choice(["mm", "mul", "t", "add_", "view", "copy_", "split"])
        if kind in ("add_", "copy_") and owned:
            one = rng.choice(owned)
            target = aten.add_.Tensor if kind == "add_" else aten.copy_.default
            # Torch writes to no tensor from a view of it in another order.
            made.append(backward.call(target, one, backward.call(aten.clone.default, other)))
        elif kind == "t":
            made.append(backward.call(aten.t.default, one))
        elif kind == "view":
            made.append(backward.call(aten.reshape.default, one, [N, N]))
        elif kind == "split":
            parts = backward.call(aten.unbind.int, backward.call(aten.stack.default, [one, other]))
            made.append(backward.call(operator.getitem, parts, 1))
        else:
            target = aten.mm.default if kind == "mm" else aten.mul.Tensor
            made.append(backward.call(target, one, other))
            owned.append(made[-1])
    results = [rng.choice([None, *made[1:]]) for _ in range(rng.randint(2, 6))]
    return backward.ending(results), rng.sample(range(len(results)), rng.randint(1, len(results)))
