"""The head and its cross-entropy over chunks of the tokens, each chunk under a checkpoint.

So only one chunk's logits are there at a time. The loss is a sum in another order than eager's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.comparison.methods import DoesNotApplyError, Variant
from benchmarks.comparison.models import Trainee


def in_chunks(trainee: Trainee, chunks: int) -> Variant:
    """The model, its head and loss taken out and run in so many chunks.

    Raises
    ------
    DoesNotApplyError : the loss is not over tokens.
    """
    model, head = trainee.model, trainee.model._modules.get("head")
    if trainee.args[0].dtype != torch.long or not isinstance(head, nn.Linear):
        raise DoesNotApplyError("its loss is not over tokens")
    whole = functional.cross_entropy

    def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
        return whole(head(hidden), targets, reduction="sum")

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
        sums = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
        return torch.stack(sums).sum() / len(targets)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        model._modules["head"] = nn.Identity()
        try:
            with patch.object(functional, "cross_entropy", loss):
                yield
        finally:
            model._modules["head"] = head

    return Variant(model, context)
