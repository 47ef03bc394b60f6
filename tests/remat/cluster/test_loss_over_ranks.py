"""Losses whose sums over tokens are over all ranks, seen in one process by halves of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from remat.cluster.apply.loss_over_ranks import require_summed_loss
from remat.cluster.capture.tokens_over_ranks import OwnLoss, SequencePart
from remat.graph_capture.errors import CaptureError
from tests.distributed.gradients.models import LOSSES

CLASSES, TOKENS = 48, 16


def tried(loss: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(2, TOKENS, CLASSES, generator=stream).to(dtype)
    ids = torch.randint(CLASSES, (2, TOKENS), generator=stream)
    require_summed_loss(OwnLoss(SequencePart(2 * TOKENS, 0, 2), loss), logits, ids, 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_torch_and_by_hand(name: str, dtype: torch.dtype) -> None:
    tried(LOSSES[name](), dtype)


def flat(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1).float()


def of_sequences(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean over sequences of the mean over each one's tokens that count."""
    each = functional.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none")
    kept = ids != -100
    return ((each * kept).sum(1) / kept.sum(1).clamp(min=1)).mean()


SUMS: dict[str, Callable[..., Tensor]] = {
    "module": lambda out, ids: nn.CrossEntropyLoss(label_smoothing=0.2)(
        out.transpose(1, 2).float(), ids
    ),
    "of sequences": of_sequences,
    "over a number": lambda out, ids: functional.cross_entropy(
        flat(out), ids.flatten(), reduction="sum"
    ) / max((ids != -100).sum().item(), 1),
    "over numel": lambda out, ids: functional.cross_entropy(
        flat(out), ids.flatten(), reduction="sum"
    ) / ids.numel(),
    "over len": lambda out, ids: functional.cross_entropy(
        flat(out), ids.flatten(), reduction="sum"
    ) / len(ids[ids != -100]),
    "batchmean": lambda out, _: functional.kl_div(
        flat(out).log_softmax(-1), torch.full((CLASSES,), 1 / CLASSES), reduction="batchmean"
    ),
    "root of a mean": lambda out, _: out.float().square().mean().sqrt(),
    "of a mean vector": lambda out, _: out.float().mean((0, 1)).square().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_tokens_in_other_forms(name: str) -> None:
    tried(SUMS[name])


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "norm": (lambda out, _: out.float().norm(), "is no sum or mean over tokens"),
    "shape": (
        lambda out, ids: functional.cross_entropy(
            flat(out), ids.flatten(), reduction="sum"
        ) / (ids.shape[0] * ids.shape[1]),
        "of two ranks is not that of one",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_ranks_cannot_sum_is_refused(name: str) -> None:
    loss, why = REFUSED[name]
    with pytest.raises(CaptureError, match=r"^make the loss of sums and means.*--cp 1") as said:
        tried(loss)
    assert why in str(said.value)
