"""What context parallel ranks may run on their own tokens, seen in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.cluster.apply.context_ranks import (
    ChangedPlaces,
    is_token_local,
    require_token_local_block,
    require_token_local_loss,
)
from remat.cluster.capture.tokens_over_ranks import OwnLoss, SequencePart, cut_dimension
from remat.cluster.model_part import Arrival
from remat.graph_capture.errors import CaptureError
from tests.distributed.context.models import (
    VOCAB,
    WIDTH,
    Block,
    Convolved,
    Masked,
    OpenAttention,
    OwnRotation,
    class_loss,
    pooled_loss,
    rotation_of,
    shifted_loss,
)
from tests.distributed.pipeline.models import token_loss

TOKENS = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def given(dtype: torch.dtype, **kwargs: Any) -> Arrival:
    return Arrival(torch.zeros(2, TOKENS, WIDTH, dtype=dtype), (), kwargs)


def refused(block: nn.Module, call: Arrival, cut: dict[int, int], ranks: int = 2) -> str:
    try:
        require_token_local_block("layers.0", block, call, cut, ranks)
    except CaptureError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_that_are_given_with_the_tokens_are_no_positions(dtype: torch.dtype) -> None:
    block = Block().to(dtype)
    rotation = rotation_of(TOKENS, torch.zeros((), dtype=dtype))
    cut = {id(one): 0 for one in rotation}
    assert refused(block, given(dtype, rotation=rotation), cut) == ""
    assert refused(block, given(dtype), {}) == ""
    # The same, if nobody says that they belong to tokens.
    assert "depends on the position of a token" in refused(
        block, given(dtype, rotation=rotation), {}
    )


class Drops(Block):
    """Dropout, which draws anew in each call."""

    def forward(self, x: Tensor, rotation: Any = None) -> Tensor:
        return super().forward(functional.dropout(x, 0.5, self.training), rotation)


class Adds(Block):
    """Adds a small vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor, rotation: Any = None) -> Tensor:
        return super().forward(x + self.places[: x.shape[1]], rotation)


class Sums(Block):
    """Each token reads all later ones."""

    def forward(self, x: Tensor, rotation: Any = None) -> Tensor:
        return super().forward(x + x.flip(1).cumsum(1).flip(1), rotation)


class Crosses(Block):
    """Attention over half of the tokens."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        half = k.shape[2] // 2
        return functional.scaled_dot_product_attention(
            q, k[:, :, :half], v[:, :, :half], enable_gqa=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Drops, "^$"),
        (OwnRotation, "depends on the position of a token"),
        (Adds, "depends on the position of a token"),
        (Convolved, "mixes tokens outside of attention"),
        (Sums, "mixes tokens outside of attention"),
        (OpenAttention, "mixes tokens outside of attention"),
        (Masked, "cannot share this attention, which has a mask"),
        (Crosses, "has keys of other tokens than its queries"),
    ],
)
def test_what_a_block_does_with_tokens(
    kind: Callable[[], nn.Module], said: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    block = kind().to(dtype)
    assert re.search(said, refused(block, given(dtype), {}))
    assert block.training


def test_heads_are_looked_at_before_anything_runs_on_ranks() -> None:
    text = refused(Block(), given(torch.float32), {}, ranks=8)
    assert "8 context parallel ranks cannot share this attention, which has 4 heads" in text
    assert text.startswith("plan with --cp 1")


@pytest.mark.parametrize(
    ("loss_fn", "is_right"),
    [(token_loss, True), (shifted_loss, False), (pooled_loss, False)],
)
@pytest.mark.parametrize("ignored", [0, 5])
def test_a_loss_is_of_each_token(loss_fn: Any, is_right: bool, ignored: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB)
    target = torch.randint(VOCAB, (2, TOKENS))
    target[:, TOKENS - ignored :] = -100

    def loss_of(border: Tensor, ids: Tensor) -> Tensor:
        return loss_fn(head(border), ids)

    def look() -> None:
        counts = SequencePart(TOKENS, 0, 1).counts_tokens
        require_token_local_loss(loss_of, torch.zeros(2, TOKENS, WIDTH), target, counts)

    if is_right:
        look()
        assert head.weight.grad is None
    else:
        with pytest.raises(CaptureError, match=r"(?s)mean over tokens.*The loss (mixes|depends)"):
            look()


def test_a_class_for_each_sequence_is_no_target_of_tokens() -> None:
    head = nn.Linear(WIDTH, VOCAB)
    with pytest.raises(CaptureError, match="the loss"):
        require_token_local_loss(
            lambda border, classes: class_loss(3 * torch.tanh(head(3 * border)), classes),
            torch.zeros(2, TOKENS, WIDTH), torch.tensor([1, 2]), lambda _: False,
        )  # fmt: skip


class Stem(nn.Module):
    """An embedding; learned positions, or a convolution, beside it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.what = what

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        if self.what == "positions":
            return x + self.pos(torch.arange(ids.shape[1]))
        return x + functional.pad(x, (0, 0, 1, -1)) if self.what == "mixed" else x


@pytest.mark.parametrize("own", [TOKENS, TOKENS // 2])
@pytest.mark.parametrize("ids", ["alike", "drawn"])
@pytest.mark.parametrize(("what", "is_right"), [("", True), ("positions", False), ("mixed", False)])
def test_what_comes_before_the_blocks(what: str, is_right: bool, ids: str, own: int) -> None:
    """Where two tensor parallel ranks share the border, each has half of it."""
    stem = Stem(what)
    batch = torch.randint(VOCAB, (2, TOKENS)) if ids == "drawn" else torch.ones(2, TOKENS).long()
    counts = SequencePart(TOKENS, 0, 1).counts_tokens

    def border_of(given: tuple[Tensor]) -> Tensor:
        return stem(*given)[:, :own]

    places = ChangedPlaces(own)
    assert is_token_local(stem, border_of, (batch,), counts, places) == is_right


def test_a_part_is_cut_where_tokens_are_counted() -> None:
    part = SequencePart(8, 1, 2)
    ids, scale, per_sequence = torch.arange(16).view(2, 8), 3.0, torch.ones(2)
    own = part.of({"ids": ids, "scale": scale, "weights": per_sequence})
    assert torch.equal(own["ids"], ids[:, 4:])
    assert own["ids"].is_contiguous()
    assert own["scale"] is scale
    assert own["weights"] is per_sequence
    assert (
        OwnLoss(part, lambda result, target: result + target.sum())(1, ids) == 1 + ids[:, 4:].sum()
    )
    assert OwnLoss(part, lambda result: result)(2) == 2


def test_parts_in_a_ring_are_two_of_each_group_and_together_all() -> None:
    """Two groups of two ranks: the first has the first and the last quarter of 16 tokens."""
    ids = torch.arange(16).view(1, 16)
    own = [SequencePart(16, at, 4, 2).along(ids, 1)[0].tolist() for at in range(4)]
    assert own == [[0, 1, 12, 13], [2, 3, 14, 15], [4, 5, 8, 9], [6, 7, 10, 11]]


def test_an_argument_of_pairs_of_tokens_is_refused() -> None:
    part = SequencePart(8, 0, 2)
    assert cut_dimension(torch.ones(8, 4), torch.ones(4, 4), part, "cos") == 0
    assert cut_dimension(torch.ones(3), torch.ones(3), part, "rates") is None
    assert cut_dimension(0.5, 0.5, part, "scale") is None
    for whole, own in (((8, 8), (4, 4)), ((8, 1), (4,))):
        with pytest.raises(
            CaptureError,
            match=r"give blocks one mask for each token, or plan with --cp 1: it is \[8, ",
        ):
            cut_dimension(torch.ones(whole), torch.ones(own), part, "mask")
