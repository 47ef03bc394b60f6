"""Batches and results in containers of the user's, with and without names for their parts."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import remat
from remat.graph_capture.errors import CaptureError, SignatureError
from remat.graph_capture.tracing.signature import leaves_with_paths
from remat.ranks.same_order import agreed_rewrite


@dataclasses.dataclass
class Sample:
    """Registered as many libraries do it: without names for its parts."""

    sample: Any
    more: Any = None


class Fields(collections.OrderedDict[str, Any]):
    """A mapping that is registered in the same way, as the outputs of diffusers are."""


pytree.register_pytree_node(Sample, lambda s: ([s.sample, s.more], None), lambda v, _: Sample(*v))
pytree.register_pytree_node(
    Fields,
    lambda fields: (list(fields.values()), list(fields)),
    lambda values, keys: Fields(zip(keys, values, strict=True)),  # pyright: ignore
)


class Model(nn.Module):
    """Layers that take and return a tensor inside of some container."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(32, 32), nn.GELU())])

    def forward(self, given: Any) -> Any:
        x = pytree.tree_leaves(given)[0]
        return self.kind(self.layers(x))


def nested(x: Tensor) -> dict[str, Any]:
    return {"out": [Sample(x, Fields(twice=2 * x))], "n": 3}


@pytest.mark.parametrize("kind", [Sample, lambda x: Fields(sample=x), nested])
def test_results_and_batches_without_names_train_as_eager(kind: Any) -> None:
    x = kind(torch.randn(512, 32))
    model = Model(kind)
    module = remat.rematerialize(model, (x,), budget="100%", solver="chen_sqrt")
    found = remat.check(model, module, (x,), steps=1)
    assert found.differences == ()
    assert found.gradients == found.gradients_total == 6
    assert str(pytree.tree_structure(module(x))) == str(pytree.tree_structure(model(x)))


def test_parts_without_names_are_numbered() -> None:
    tree = {"a": Sample(torch.zeros(1), [4, Fields(b=5)]), "c": (6,)}
    found = [(pytree.keystr(path), leaf) for path, leaf in leaves_with_paths(tree)]
    assert [path for path, _ in found] == ["['a'][0]", "['a'][1][0]", "['a'][1][1][0]", "['c'][0]"]
    assert [leaf for _, leaf in found] == pytree.tree_leaves(tree)


def test_named_paths_are_torchs_own() -> None:
    pair = collections.namedtuple("pair", "x y")
    tree = [{"a": pair(1, (2, None))}, collections.OrderedDict(z=[3, ()]), torch.ones(2, 2).max(0)]
    assert leaves_with_paths(tree) == pytree.tree_flatten_with_path(tree)[0]


def test_refusals_name_the_numbered_part() -> None:
    model = Model(Sample)
    module = agreed_rewrite(model, schedule_of(model, Sample(torch.randn(64, 32))))
    with pytest.raises(SignatureError, match=r"planned for args\[0\]\[0\] = float32\[64, 32\]"):
        module(Sample(torch.randn(8, 32)))
    with pytest.raises(CaptureError, match=r"args\[0\]\[1\] is a object, whose tensors"):
        remat.capture(model, (Sample(torch.randn(64, 32), object()),))


def schedule_of(model: nn.Module, *args: Any) -> Any:
    return remat.solve(remat.capture(model, args), "100%", solver="store_all").schedule
