"""DDP makes its buckets in the order in which gradients come: they come in eager's order then.

After the first backward DDP (Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704) makes its
buckets again, in the order in which gradients came. A ring adds up each element in an order that
its place in the bucket decides, so over more than two ranks another order gives other last bits.
A compiled step is one autograd node, whose gradients all come together. So, until the buckets are
made, each parameter passes through a node of its own. Of the nodes that are ready, autograd's
engine takes the one first that forward made last.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

MOST_EXACT_RANKS = 2
"""A sum of two terms has one order."""


def is_order_noted() -> bool:
    """Whether the DDP that runs now makes its buckets in the order of this step's gradients."""
    wrapper: Any = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper._has_rebuilt_buckets:
        return False
    # As DDP's reducer decides it: with a static graph it looks for no unused parameters.
    makes_new = wrapper.static_graph or not wrapper.find_unused_parameters
    return makes_new and wrapper.process_group.size() > MOST_EXACT_RANKS


def in_arrival_order(tensors: Sequence[Tensor], arrivals: Sequence[int]) -> list[Tensor]:
    """`tensors`, of which those at the places `arrivals` get their gradients in that order."""
    passed = list(tensors)
    for place in reversed(arrivals):
        passed[place] = passed[place].view_as(passed[place])
    return passed


def warn_of_own_order(kind: str) -> None:
    """Warn of gradients that are handed over as they are made, which come in the plan's order.

    Parameters
    ----------
    kind : the class of the rewritten module, for the message.
    """
    warnings.warn(
        f"DistributedDataParallel makes its buckets in the order in which the gradients of the "
        f"rewritten {kind} come, which was planned for one rank: last bits of gradients may differ "
        'from those around eager. Plan with sharding=remat.Sharding("ddp", ranks)',
        stacklevel=2,
    )
