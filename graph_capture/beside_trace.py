"""A mode that watches the ops of a trace and is no part of it."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class BesideTrace(TorchDispatchMode):
    """Sees each op that forward runs while it is traced."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Under other modes torch runs what is compiled uncompiled, and it would not be refused."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As `is_infra_mode`."""
        return True
