"""The bits of a tensor as a short text, so that results are compared without a copy of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from remat.graph_capture.joint.tensor_bits import bits_of

PIECE_BYTES = 1 << 16
"""Of a tensor that is not contiguous, so much is copied at a time."""


def fingerprint(tensor: Tensor) -> str:
    """Equal for tensors of one dtype, shape and bits, of those on a CPU. Takes next to no memory.

    Source: J.-P. Aumasson et al., BLAKE2, 2013.
    """
    found = hashlib.blake2b(digest_size=16)
    for piece in _pieces(tensor.detach()):
        found.update(bits_of(piece).numpy().data)
    return f"{tensor.dtype} {list(tensor.shape)} {found.hexdigest()}"


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    is_whole = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    if is_whole or tensor.nbytes <= PIECE_BYTES:
        yield tensor
        return
    for part in tensor.unbind(0):
        yield from _pieces(part)


def has_bits(tensor: Tensor) -> bool:
    """Whether its bits can be read one after the other: not those of a sparse tensor."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
