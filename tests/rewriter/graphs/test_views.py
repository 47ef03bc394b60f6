"""A planned step makes few calls: linears are one, and no view shows what is there already."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import remat
from tests.beside_eager import same_bits

aten = torch.ops.aten


class _Rows(nn.Module):
    """Two linears on a batch of sequences, the first by `first`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def first(self, x: Tensor) -> Tensor:
        return self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.first(x))).square().mean()


class _NotContiguous(_Rows):
    """Its product is that of rows which `linear` would take another way."""

    def first(self, x: Tensor) -> Tensor:
        shown = torch.cat([x, x], -1)[..., :8]
        product = torch.addmm(self.up.bias, shown.view(-1, 8), self.up.weight.t())
        return product.view(*x.shape[:-1], 16)


def planned(model: nn.Module) -> Any:
    args = (torch.randn(3, 5, 8),)
    plan = remat.solve(remat.capture(model, args), 2**40, "store_all")
    module = plan.apply(model)
    assert same_bits(model, module, args)
    return module


def calls(gm: fx.GraphModule) -> Counter[Any]:
    return Counter(n.target for n in gm.graph.nodes if n.op == "call_function")


def test_linears_are_one_call() -> None:
    module = planned(_Rows())
    found = calls(module.forward_module)
    assert found[aten.linear.default] == 2
    assert not {aten.addmm.default, aten.mm.default, aten.t.default, aten.view.default} & {*found}


def test_backward_transposes_each_gradient_once_and_returns_products() -> None:
    module = planned(_Rows())
    gradients = module.backward_module.graph.output_node().args[0]
    assert [g.target for g in gradients if g is not None and len(g.meta["val"].shape) == 2] == [
        aten.mm.default
    ] * 2
    assert calls(module.backward_module)[aten.t.default] == 2  # of gradients, not of products


def test_what_linear_would_run_otherwise_stays_a_product_of_rows() -> None:
    module = planned(_NotContiguous())
    taken = module.forward_module.graph.find_nodes(op="call_function", target=aten.linear.default)
    assert [one.args[0].meta["val"].dim() for one in taken] == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_are_kept(dtype: torch.dtype) -> None:
    model, args = _Rows().to(dtype), (torch.randn(3, 5, 8, dtype=dtype),)
    module = remat.solve(remat.capture(model, args), 2**40, "store_all").apply(model)
    assert same_bits(model, module, args)
