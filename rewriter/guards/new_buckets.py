"""DDP over more than two ranks that orders its buckets anew: sums in another order than eager's.

After the first backward DDP (Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704) makes its
buckets again, in the order in which gradients came. A rewritten step hands gradients over in an
order of its own, so buckets are others than around eager. A ring adds up each element in an order
that its place in the bucket decides. Two ranks cannot show it, as a + b is b + a.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

MOST_EXACT_RANKS = 2
"""A sum of two terms has one order."""

_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def warn_of_new_buckets(kind: str) -> None:
    """Warn once for each DDP that runs now, if its sums may be others than around eager.

    Parameters
    ----------
    kind : the class of the rewritten module, for the message.
    """
    wrapper: Any = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper in _warned or not _makes_new_buckets(wrapper):
        return
    n_ranks = wrapper.process_group.size()
    if n_ranks <= MOST_EXACT_RANKS:
        return
    _warned.add(wrapper)
    warnings.warn(
        f"DistributedDataParallel over {n_ranks} ranks orders its buckets anew as the gradients of "
        f"the rewritten {kind} arrive, in another order than eager's: after the first step, last "
        "bits of gradients may differ from those around eager. find_unused_parameters=True, "
        "without static_graph, keeps the first order and eager's bits",
        stacklevel=2,
    )


def _makes_new_buckets(wrapper: Any) -> bool:
    """As DDP's reducer decides it: with a static graph it looks for no unused parameters."""
    return wrapper.static_graph or not wrapper.find_unused_parameters
