"""Whether pieces give eager's bits, kept on disk beside prices.

To compare them takes as long as a few runs of the region. The answer hangs on the device, its
settings and torch's version, by which the file is named, and on shapes and dtypes.
"""

from __future__ import annotations

import hashlib
import os

import torch

from remat.graph_capture.devices.meter import Meter
from remat.graph_capture.prices.pieces import IsExact
from remat.graph_capture.prices.price_cache import PriceCache
from remat.graph_capture.splitting.regions import Found
from remat.graph_capture.splitting.same_bits import (
    MOST_DRAWS,
    SEEN_NUMBERS,
    gives_eagers_bits,
    likeness,
    note_bits,
)


def kept_bits(meter: Meter, cache: PriceCache | None = None) -> IsExact:
    """`gives_eagers_bits` on the device of `meter`, asked once for each region and number of
    pieces.

    Parameters
    ----------
    cache : of the device; None for the one on disk.
    """
    kept = cache or PriceCache.of(meter)

    def has_them(found: Found) -> bool:
        key = _digest_of(found)
        if key not in kept.bits:
            answer = gives_eagers_bits(found)
            if answer is None:
                return False
            kept.bits[key] = answer
            kept.save()
        note_bits(found, kept.bits[key])
        return kept.bits[key]

    return has_them


def _digest_of(found: Found) -> str:
    """A digest of what decides which kernels run, whole and in pieces."""
    parts = [
        f"{SEEN_NUMBERS} logits in {MOST_DRAWS} draws",
        torch.backends.cpu.get_cpu_capability(),
        torch.get_float32_matmul_precision(),
        str(torch.are_deterministic_algorithms_enabled()),
        str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        os.environ.get("MKL_CBWR", ""),
    ]
    alike = (likeness(*pair) for pair in zip(found.parts, found.nodes, strict=True))
    parts += dict.fromkeys(alike)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
