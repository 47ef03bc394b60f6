"""How a step is spread over ranks: the ways of data parallelism that torch has.

Words are torch's: an option is called as the argument of the wrapper that it stands for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from remat.graph_capture.errors import DeviceError, option

ShardingKind = Literal["none", "ddp", "zero1", "replicate", "fsdp2"]
_KINDS: tuple[str, ...] = get_args(ShardingKind)
_TAKEN_BY: dict[str, tuple[str, ...]] = {
    "blocks": ("fsdp2", "replicate"),
    "replicas": ("fsdp2",),
    "reshard_after_forward": ("fsdp2",),
    "bucket_views": ("ddp", "zero1"),
    "param_dtype": ("fsdp2", "replicate"),
    "reduce_dtype": ("fsdp2", "replicate"),
    "cpu_offload": ("fsdp2",),
    "states_over": ("fsdp2", "zero1"),
}
"""By option, the kinds of sharding that have it."""
_PARAM_DTYPES = ("bfloat16", "float16")
_REDUCE_DTYPES = ("float32", *_PARAM_DTYPES)


@dataclass(frozen=True)
class Sharding:
    """How a step is spread over ranks.

    Attributes
    ----------
    kind : ``none``; ``ddp``, where every rank has all parameters, and buckets for their
        gradients; ``zero1``, that with `ZeroRedundancyOptimizer`, which gives each rank the
        optimizer state of whole parameters; ``replicate``, where `replicate` of FSDP2 copies the
        parameters for the step; ``fsdp2``, where each rank has an equal part of parameters,
        gradients and optimizer state, as `fully_shard` of the whole model does.
    world_size : number of ranks.
    blocks : a glob over the paths of modules that are sharded by themselves first. Empty for none.
    replicas : shard groups that hold the same, on a mesh of replicas x shards: HSDP, MiCS.
    reshard_after_forward : of `fully_shard`. False keeps the parameters of forward whole (ZeRO-2),
        a number shards them over that many ranks until backward (hpZ of ZeRO++). Left out, all but
        the root's go back to shards (ZeRO-3).
    bucket_views : whether DDP is given ``gradient_as_bucket_view=True``.
    param_dtype, reduce_dtype : of `MixedPrecisionPolicy`, by name, such as ``bfloat16``. Parameters
        of float32 and the batch are cast to the first; gradients are summed in the second.
    cpu_offload : whether parameters, gradients and optimizer state are kept on the host, as
        `CPUOffloadPolicy` does.
    states_over : ranks that share one optimizer state. Of ``fsdp2`` a multiple of the shard group,
        whose ranks update each a slice of their shards (PaRO, AMSP); torch has no such optimizer.
        Of ``zero1`` the `process_group`. Left at 0, all that share parameters, or all ranks.

    References
    ----------
    Rajbhandari et al., ZeRO, 2020, https://arxiv.org/abs/1910.02054. Wang et al., ZeRO++, 2023,
    https://arxiv.org/abs/2306.10209. Zhang et al., MiCS, 2022, https://arxiv.org/abs/2205.00119.
    Chen et al., AMSP, 2023, https://arxiv.org/abs/2311.00257.
    """

    kind: ShardingKind = "none"
    world_size: int = 1
    blocks: str = ""
    replicas: int = 1
    reshard_after_forward: bool | int | None = None
    bucket_views: bool = False
    param_dtype: str = ""
    reduce_dtype: str = ""
    cpu_offload: bool = False
    states_over: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise DeviceError(f"unknown sharding '{self.kind}': choose {_listed(_KINDS, 'or')}")
        if self.kind != "none" and self.world_size < 2:
            raise DeviceError(
                f"sharding {self.kind} over {self.world_size} rank: name the number of ranks, "
                f"{option('world_size', 2)} or more"
            )
        if self.kind == "none" and self.world_size != 1:
            raise DeviceError(
                f"{self.world_size} ranks and no {option('sharding')}: choose "
                f"{_listed(_KINDS[1:], 'or')}"
            )
        for field in fields(self):
            takers = _TAKEN_BY.get(field.name, _KINDS)
            if self.kind not in takers and getattr(self, field.name) != field.default:
                raise DeviceError(
                    f"sharding {self.kind} has no {field.name}: leave it out, or choose "
                    f"{_listed(takers, 'or')}"
                )
        self._require_even_groups()
        self._require_dtypes()

    def _require_even_groups(self) -> None:
        """Raise for groups of ranks that the others do not divide into."""
        if self.replicas < 1 or self.world_size % self.replicas:
            raise DeviceError(
                f"{self.replicas} replicas do not divide {self.world_size} ranks: choose a number "
                "of replicas that does, or another world_size"
            )
        shards = self.shard_ranks
        if self.kind == "fsdp2" and shards == 1:
            raise DeviceError(
                f"{self.replicas} replicas on {self.world_size} ranks leave one rank a shard group,"
                " so nothing is sharded: choose fewer replicas, or the sharding replicate"
            )
        keep = self.reshard_after_forward
        if keep is not None and not isinstance(keep, bool) and (keep < 2 or shards % keep):
            raise DeviceError(
                f"{option('reshard_after_forward', keep)} does not divide a shard group of "
                f"{shards} ranks: choose a number from 2 up that does, or no (False) to keep "
                "parameters whole"
            )
        least = shards if self.kind == "fsdp2" else 2
        over = self.states_over
        if over and (over < least or over % shards or self.world_size % over):
            raise DeviceError(
                f"{option('states_over', over)} ranks: choose a multiple of {least} that divides "
                f"{self.world_size} ranks"
            )

    def _require_dtypes(self) -> None:
        for name, known in (("param_dtype", _PARAM_DTYPES), ("reduce_dtype", _REDUCE_DTYPES)):
            dtype = getattr(self, name)
            if dtype and dtype not in known:
                raise DeviceError(
                    f"{name} '{dtype}' is none that a mixed precision policy casts to here: choose "
                    f"{_listed(known, 'or')}, or leave it out"
                )

    @property
    def shard_ranks(self) -> int:
        """Ranks that share one copy of the parameters; 1 where each has all."""
        return self.world_size // self.replicas if self.kind == "fsdp2" else 1

    @property
    def has_buckets(self) -> bool:
        """Whether DDP's buckets hold all gradients."""
        return self.kind in ("ddp", "zero1")

    def shard_elements(self, shape: Sequence[int]) -> int:
        """Elements of one rank's part of a parameter: an equal part of the first dimension.

        It is rounded up, as FSDP2 pads.
        """
        if self.shard_ranks == 1:
            return math.prod(shape)
        first = shape[0] if shape else 1
        return -(-first // self.shard_ranks) * math.prod(shape[1:])

    def state_elements(self, shape: Sequence[int]) -> int:
        """Elements of one rank's part of an optimizer state of a parameter that it updates."""
        parts = self.states_over // self.shard_ranks if self.kind == "fsdp2" else 1
        return -(-self.shard_elements(shape) // max(parts, 1))


NO_SHARDING = Sharding()
UNTIMED = "the time of communication is not counted"
MASTER_BYTES = 4
"""Of an element of a parameter that a mixed precision policy casts: it is held in float32."""


def element_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype by its name, such as ``bfloat16``."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _listed(words: Sequence[str], link: str) -> str:
    return f"{', '.join(words[:-1])} {link} {words[-1]}" if len(words) > 1 else words[0]
