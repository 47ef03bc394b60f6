"""The settings of torch's CUDA caching allocator, and the sizes that follow from them.

``PYTORCH_ALLOC_CONF`` has them in MiB, by names such as ``large_segment_size_mb``. The constants
are those of PyTorch 2.11 to 2.14 (``c10/core/AllocatorConfig.h`` of
https://github.com/pytorch/pytorch).
"""

from __future__ import annotations

import msgspec

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
"""Every block is a multiple of it."""
SMALL_BYTES = MIB
"""Blocks up to it come from the small pool, larger ones from the large pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
"""From this size on, a block that finds no room gets a segment of its own size."""
SEGMENT_MULTIPLE_BYTES = 2 * MIB
"""Segments of their own size are a multiple of it."""
UNLIMITED_BYTES = 1 << 50


def multiple_above(size_bytes: int, unit_bytes: int) -> int:
    """The least multiple of `unit_bytes` that is no less than `size_bytes`."""
    return -(-size_bytes // unit_bytes) * unit_bytes


class AllocatorSettings(msgspec.Struct, frozen=True):
    """How the allocator is set, and how large its device is.

    Attributes
    ----------
    expandable_segments : one growing range of addresses for each pool, in place of segments.
    max_split_bytes : blocks from this size on are not split, and not given to smaller requests.
    max_non_split_rounding_bytes : by how much such a block may be larger than its request; at least
        `large_segment_bytes`, which it is where torch is not told.
    roundup_power2_divisions : sizes are rounded up to so many steps between two powers of two; a
        power of two itself. 0 rounds to multiples of 512 bytes.
    large_segment_bytes : size of the segments that several large blocks share, and of the pages of
        an expandable one.
    capacity_bytes : of the device.
    """

    expandable_segments: bool = False
    max_split_bytes: int = UNLIMITED_BYTES
    max_non_split_rounding_bytes: int = 0
    roundup_power2_divisions: int = 0
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    capacity_bytes: int = UNLIMITED_BYTES

    def block_bytes(self, asked_bytes: int) -> int:
        """Bytes that a request takes of a block that can be split.

        Parameters
        ----------
        asked_bytes : above 0.
        """
        divisions = self.roundup_power2_divisions
        if divisions <= 1 or asked_bytes <= MIN_BLOCK_BYTES * divisions:
            return multiple_above(asked_bytes, MIN_BLOCK_BYTES)
        power_of_two = 1 << (asked_bytes.bit_length() - 1)
        return multiple_above(asked_bytes, power_of_two // divisions)

    def segment_bytes(self, block_bytes: int) -> int:
        """Bytes of the segment that is taken from the device for a block."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return multiple_above(block_bytes, SEGMENT_MULTIPLE_BYTES)

    def page_bytes(self, is_small: bool) -> int:
        """By how much an expandable segment of the small or of the large pool grows."""
        return SMALL_SEGMENT_BYTES if is_small else self.large_segment_bytes
