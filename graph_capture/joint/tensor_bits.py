"""The bytes of a tensor, by which values are compared: a NaN equals a NaN of the same bits."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a strided tensor in the order of its elements, shape (bytes,), dtype uint8.

    What is contiguous is not copied. A tensor of one element is, whatever its stride: 0 where it
    was expanded. Only a stride of 1 can be read as bytes, so it is given that.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
