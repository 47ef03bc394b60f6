"""Ops that only raise an error for some values stay in the graph.

torch 2.11 takes them for ops without an effect, as nothing reads them, and drops them. The plan of
a model that calls `torch.linalg.cholesky` would go on with NaN where eager raises. Later releases
know that they have one. With every release they are refused (`joint/refuse_ops.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch._higher_order_ops import effects

CHECKING_OPS = ("aten::_linalg_check_errors",)


@contextlib.contextmanager
def checks_kept() -> Generator[None]:
    """While tracing, let torch know that these ops have an effect."""
    torch_effects: Any = effects
    with contextlib.ExitStack() as stack:
        for op in CHECKING_OPS:
            if torch_effects._get_effect(op) is None:
                ordered = torch_effects._EffectType.ORDERED
                stack.callback(torch_effects._register_effectful_op(op, ordered).destroy)
        yield
