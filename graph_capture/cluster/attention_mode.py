"""Calls of torch's fused attention in a forward, seen with their arguments by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class AttentionMode(TorchFunctionMode):
    """Has `attend` in the place of torch's fused attention; all other calls are torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **given)
        return self.attend(**{**dict(zip(POSITIONAL, args, strict=False)), **given})

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """What a call returns; `given` are its other arguments."""
