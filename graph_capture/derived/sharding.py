"""How a step is spread over ranks, and what of it lasts on one of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from remat.graph_capture.errors import DeviceError

ShardingKind = Literal["none", "ddp", "fsdp2"]


@dataclass(frozen=True)
class Sharding:
    """How a step is spread over ranks.

    Attributes
    ----------
    kind : ``none``; ``ddp``, where every rank has all parameters, and buckets for their
        gradients; ``fsdp2``, where each has an equal part of parameters, gradients and
        optimizer state, as `fully_shard` of the whole model does.
    world_size : number of ranks.
    blocks : of ``fsdp2``: a glob over the paths of modules that are sharded by themselves
        first. Empty for none.
    """

    kind: ShardingKind = "none"
    world_size: int = 1
    blocks: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("none", "ddp", "fsdp2"):
            raise DeviceError(f"unknown sharding '{self.kind}': choose none, ddp or fsdp2")
        if self.kind != "none" and self.world_size < 2:
            raise DeviceError(
                f"sharding {self.kind} over {self.world_size} rank: name the number of ranks, "
                "world_size=2 or more (--world-size)"
            )
        if self.kind == "none" and self.world_size != 1:
            raise DeviceError(
                f"{self.world_size} ranks and no sharding: choose ddp or fsdp2 (--shard)"
            )
        if self.blocks and self.kind != "fsdp2":
            raise DeviceError(f"sharding {self.kind} has no blocks: they belong to fsdp2")

    def shard_elements(self, shape: Sequence[int]) -> int:
        """Elements of one rank's part of a parameter: an equal part of the first dimension.

        It is rounded up, as FSDP2 pads.
        """
        if self.kind != "fsdp2":
            return math.prod(shape)
        first = shape[0] if shape else 1
        return -(-first // self.world_size) * math.prod(shape[1:])


NO_SHARDING = Sharding()
UNTIMED = "the time of communication is not counted"


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype by its name, such as ``bfloat16``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
