"""Whether a model is a chain, and how its layers are split, from a forward without storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.cluster.capture.model_chain import ChainModel, chain_of
from remat.cluster.capture.rank_graph import runs_split
from remat.cluster.capture.watching import watch
from remat.graph_capture.distributed.collectives import FakeGroups, fake_ranks
from remat.graph_capture.errors import CaptureError
from tests.distributed.context.models import Block, Decoder, factory_of
from tests.remat.cluster.capture import chains
from tests.remat.cluster.capture.families import given


@pytest.fixture(scope="module")
def groups() -> Iterator[FakeGroups]:
    with fake_ranks() as made:
        yield made


def chain_from(
    factory: Callable[..., dict[str, Any]], pattern: str = "", **sizes: int
) -> ChainModel:
    built = factory(**sizes)
    return chain_of(built["model"], built["args"], {}, built["loss_fn"], built["target"], pattern)


def test_a_decoder_is_a_chain_of_its_layers() -> None:
    chain = chain_from(chains.small_llama, batch=2, seq=16)
    shape = watch(chain)
    assert list(chain.blocks) == [f"layers.{i}" for i in range(4)]
    assert shape.border is not None
    assert shape.border.shape == (2, 16, 64)
    assert shape.border.dtype == torch.bfloat16
    assert shape.has_fused_attention
    assert not shape.has_open_attention


@pytest.mark.parametrize(
    ("make", "is_sent"),
    [
        (lambda model, ids: ids[..., None] > 3, False),
        (lambda model, ids: model.tok.weight.sum(), False),
        (lambda model, ids: torch.rand(ids.shape[1], 1), False),
        (lambda model, ids: torch.arange(ids.shape[1])[:, None], True),
    ],
)
def test_what_only_ranks_with_the_batch_can_make_is_known(
    make: Callable[[Any, Tensor], Tensor], is_sent: bool
) -> None:
    shape = watch(chain_from(given(make), batch=2))
    assert shape.unsent.startswith("compute argument 1 in the blocks") != is_sent
    assert bool(shape.unsent) != is_sent


@pytest.mark.parametrize("inside", [True, False])
def test_attention_beside_dropout_is_not_shared(inside: bool) -> None:
    class Dropping(Block):
        def forward(self, x: Tensor, rotation: Any = None) -> Tensor:
            return super().forward(x if inside else functional.dropout(x, 0.1), rotation)

        def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            p = 0.1 if inside else 0.0
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True)

    shape = watch(chain_from(factory_of(lambda: Decoder(Dropping)), batch=2))
    assert "is beside dropout" in shape.unshared
    assert watch(chain_from(factory_of(Decoder), batch=2)).unshared == ""


def test_layers_are_split_as_megatron_does() -> None:
    shape = watch(chain_from(chains.small_llama, batch=1, seq=16))
    rows = {path for path, role in shape.roles.items() if role == "rows"}
    assert rows == {"layers.0.attn.out", "layers.0.down"}
    assert set(shape.roles) - rows == {
        "layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v", "layers.0.gate", "layers.0.up",
        "head",
    }  # fmt: skip
    assert shape.gathered == {"layers.0.norm_attn": True, "layers.0.norm_mlp": True, "norm": True}


def test_products_and_attention_are_counted_from_shapes() -> None:
    shape = watch(chain_from(chains.small_llama, batch=1, seq=16))
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert shape.products_flops["block"] == 2 * 16 * weights
    assert shape.products_flops["last"] == 2 * 16 * 64 * 96
    assert shape.attention_flops["block"] == 4 * 16 * 16 * 64 // 2
    open_one = watch(chain_from(chains.small_gpt, batch=1, seq=16))
    assert open_one.attention_flops["block"] == 4 * 16 * 16 * 64
    assert open_one.has_open_attention


def test_the_same_model_has_the_same_digest_and_another_has_another() -> None:
    one, again = (watch(chain_from(chains.small_llama, batch=1, seq=16)).digest for _ in "ab")
    assert one == again
    assert watch(chain_from(chains.small_llama, batch=1, seq=32)).digest != one
    assert watch(chain_from(chains.small_gpt, batch=1, seq=16)).digest != one


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (chains.skip, "the result of block layers.0 is read by aten.add.Tensor outside the blocks"),
        (
            chains.scaled,
            "the result of block layers.0 is read by aten.mul.Tensor outside the blocks",
        ),
        (chains.turned, "block layers.2 is not called in turn, so the model is not a chain"),
    ],
)
def test_what_is_no_chain_is_refused(factory: Callable[..., dict[str, Any]], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        watch(chain_from(factory))


def test_models_without_a_list_of_blocks_are_refused() -> None:
    x = torch.zeros(1, 4)
    with pytest.raises(CaptureError, match="Linear has no list of blocks of one class"):
        chain_of(nn.Linear(4, 4), (x,), {}, None, None)
    unequal = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with pytest.raises(CaptureError, match="0 is only one, and a chain has 2 or more"):
        chain_of(unequal, (x,), {}, None, None, "0")


def test_degrees_that_heads_do_not_divide_are_told(groups: FakeGroups) -> None:
    chain = chain_from(chains.small_llama, batch=1, seq=16)
    shape = watch(chain)
    assert [runs_split(chain, shape, tp, groups) for tp in (2,)] == [""]
    assert "with a part of its heads, torch says: shape" in runs_split(chain, shape, 4, groups)
    assert runs_split(chain, shape, 3, groups) == (
        "its border [1, 16, 64] has no 3 parts of a sequence"
    )
    named = chain_from(chains.by_number, batch=1, seq=8)
    assert "with a part of its heads, torch says" in runs_split(named, watch(named), 2, groups)


def test_a_block_of_one_layer_cannot_be_split(groups: FakeGroups) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.only = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.only(self.norm(x))

    chain = chain_from(chains.made(block=One))
    shape = watch(chain)
    assert runs_split(chain, shape, 2, groups) == (
        "its result stays split: no linear layer sums it"
    )


def test_a_real_process_group_is_not_replaced(groups: FakeGroups) -> None:
    with (
        pytest.raises(CaptureError, match="plan the cluster in a process of its own"),
        fake_ranks(),
    ):
        pass
