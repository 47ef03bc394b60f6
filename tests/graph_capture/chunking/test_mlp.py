"""MLPs in a joint graph: which are found, which are not, and what they become in chunks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remat.graph_capture.capture_api import capture
from remat.graph_capture.chunking import mlp
from remat.graph_capture.chunking.mlp import ACTIVATIONS, Mlp, find_mlps, has_equal_blocks
from remat.graph_capture.chunking.regions import AND, find_regions
from remat.graph_capture.chunking.same_bits import matches_eager_bitwise
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.tracing.trace import trace
from remat.schedules.derived import with_choices
from tests.graph_capture.chunking.mlp_models import MLPS, WIDTH, Block, Blocks, batch, made
from tests.rows import each_nth


def mlps_of(model: nn.Module, args: tuple[Tensor, ...]) -> list[Mlp]:
    return find_mlps(trace(model, args).joint.module.graph)


@pytest.mark.parametrize("name", MLPS)
def test_each_mlp_is_found_with_its_gradients(name: str) -> None:
    model, args = made(name, n_blocks=2)
    options = MLPS[name][1]
    found = mlps_of(model, args)
    assert len(found) == 2
    for one in found:
        assert (one.up is not None) == options.get("gated", False)
        n_layers = 2 if one.up else 1
        n_biases = n_layers if options.get("bias", True) else 0
        # The output, the last weight's, and of each first layer those of x, weight and bias.
        assert len(one.ends) == 2 + 2 * n_layers + n_biases


class _Twice(Block):
    """Its activation is read by something else as well."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.gate(self.norm(x)))
        return x + self.down(hidden) + hidden.mean()


class _Scaled(Block):
    """The output of its activation is scaled before the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(2 * self.act(self.gate(self.norm(x))))


class _OtherInput(Block):
    """Its gate and up read different tensors."""

    def forward(self, x: Tensor) -> Tensor:
        up: Any = self.up
        return x + self.down(self.act(self.gate(self.norm(x))) * up(x))


NONE: dict[str, nn.Module] = {
    "dropout_inside": Block(nn.GELU(), inside=0.1),
    "read_twice": _Twice(nn.GELU()),
    "scaled": _Scaled(nn.GELU()),
    "other_input": _OtherInput(nn.SiLU(), gated=True),
    "softplus": Block(nn.Softplus()),
}


@pytest.mark.parametrize("name", NONE)
def test_what_cannot_run_in_chunks_is_none(name: str) -> None:
    assert mlps_of(Blocks([NONE[name]]), batch(16)) == []


def test_layers_in_a_chain_are_of_one_mlp_each() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WIDTH)]
    assert len(mlps_of(Blocks([nn.Sequential(*layers)]), batch(16))) == 1


def test_mlps_that_read_one_another_run_in_chunks_too() -> None:
    """What one returns the next reads, and its gradient is the next one's: both are replaced."""
    torch.manual_seed(0)

    def one() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH))

    model, args = nn.Sequential(one(), one()), (torch.randn(64, WIDTH), torch.randn(64, WIDTH))
    done = trace(model, args[:1], loss_fn=nn.functional.mse_loss, target=args[1])
    (found,) = find_regions(done, is_exact=True)
    assert len(found.parts) == 2
    found.joint.module.graph.lint()


@pytest.mark.parametrize("name", each_nth(3, MLPS))
def test_choices_are_the_graphs_that_a_trace_in_chunks_gives(name: str) -> None:
    """The graph with a choice has the hash of the trace that the rewriter makes."""
    model, args = made(name, n_blocks=2)
    graph = capture(model, args, split="exact")
    (region,) = graph.regions
    assert region.kinds == ("mlp",)
    for choice in region.choices:
        planned = with_choices(graph, {region.name: choice})
        assert planned.hash == _in_chunks(model, args, region.name, choice.chunks).hash
        TrainingGraph.from_json(planned.to_json())


def _in_chunks(model: nn.Module, args: tuple[Any, ...], region: str, chunks: int) -> TrainingGraph:
    import dataclasses

    from remat.graph_capture.tracing.trace import trace_recipe
    from remat.schedules.levers import REDUCTIONS, attribute_at

    wanted = tuple((name, chunks, True) for name in region.split(AND))
    edit = functools.partial(attribute_at(REDUCTIONS["chunks"].emitter), told=wanted)
    recipe = dataclasses.replace(trace(model, args).recipe, edits=(edit,))
    return trace_recipe(model, recipe).graph


def test_heads_and_mlps_are_regions_apart_and_together() -> None:
    torch.manual_seed(0)
    model = Blocks([Block(nn.GELU())], classes=100)
    x = torch.randn(4, 64, WIDTH)
    graph = capture(model, (x, torch.randint(100, (256,))), split="exact", device="h100")
    assert [one.kinds for one in graph.regions] == [("head",), ("mlp",), ("head", "mlp")]


class _Wide(nn.Module):
    """Makes more than any MLP here beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.wide = Block(nn.GELU()), nn.Parameter(torch.rand(WIDTH, 2048))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.sin(self.block(x) @ self.wide).mean() + target.mean()


def test_mlps_that_do_not_set_the_peak_are_left_whole() -> None:
    assert len(mlps_of(_Wide(), batch(64))) == 1
    assert capture(_Wide(), batch(64), split="exact").regions == ()


def test_small_mlps_stay_whole_unless_asked_for() -> None:
    model, args = made("gelu", n_blocks=1)
    assert capture(model, args, device="h100").regions == ()
    assert capture(model, args, split="exact", device="h100").regions
    model, args = made("gelu", n_blocks=1, rows=256)
    assert capture(model, args, device="h100").regions
    assert capture(model, args, split="none", device="h100").regions == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_blocks_that_fill_vectors_have_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    """And so has any block, of a function that is the same one by one."""
    torch.manual_seed(0)
    whole, of_result = (torch.randn(1 << 18).to(dtype) for _ in range(2))
    n_block = 1 << 12 if has_equal_blocks(name, whole, [1 << 12]) else 0
    any_block = 999 if has_equal_blocks(name, whole, [len(whole), 999]) else 0
    one = ACTIVATIONS[name]
    for size in filter(None, (n_block, any_block)):
        parts = zip(whole.split(size), of_result.split(size), strict=True)
        made_of = [(one(x), one.gradient(of, one(x) if one.of_result else x)) for x, of in parts]
        result = one(whole)
        expected = one.gradient(of_result, result if one.of_result else whole)
        assert torch.equal(torch.cat([value for value, _ in made_of]), result)
        assert torch.equal(torch.cat([value for _, value in made_of]), expected)


def test_blocks_whose_last_elements_run_one_by_one_are_left_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though data that is made may not show it."""
    monkeypatch.setattr(mlp, "_is_the_same_one_by_one", lambda *_: False)
    like = torch.empty(1)
    assert not has_equal_blocks("gelu", like, [777 * 333])
    assert has_equal_blocks("gelu", like, [1 << 20, 1 << 16])
    model, args = made("relu", n_blocks=1, rows=7, hidden=33)
    (found,) = find_regions(trace(model, args), is_exact=True)
    assert matches_eager_bitwise(found) is False
