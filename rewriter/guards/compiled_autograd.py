"""Compiled autograd makes one graph of a whole backward, and loses the order of a plan."""

from __future__ import annotations

from torch._dynamo import compiled_autograd, config

from remat.graph_capture.errors import RewriteError


def refuse_compiled_autograd() -> None:
    """Refuse a forward whose backward would not be run as it was planned.

    Raises
    ------
    RewriteError : compiled autograd is switched on.
    """
    if config.compiled_autograd or compiled_autograd.compiled_autograd_enabled:
        raise RewriteError(
            "compiled autograd is on, which compiles backward anew as a part of its own graph: the "
            "order of a plan is lost there, and with it the peak. Leave out "
            "torch._dynamo.config.compiled_autograd = True, or compile without a budget"
        )
