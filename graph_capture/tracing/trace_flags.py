"""What a model's code is told while it is traced, and what torch logs meanwhile.

Libraries take another way through their models where `torch.compiler.is_compiling` or
`is_exporting` says so: transformers then writes out causal masks and repeats keys, which changes
the last bits. So a model is first traced as in eager, where both say no.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

import torch

Flags = tuple[bool, bool]
FLAGS: tuple[Flags, ...] = (False, False), (True, False), (True, True)
"""What the model's code is told of compiling and of exporting: tried in this order."""


@contextlib.contextmanager
def told(flags: Flags) -> Generator[None]:
    """Set what `torch.compiler.is_compiling` and `is_exporting` tell the model's code."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


@contextlib.contextmanager
def unlogged() -> Generator[None]:
    """Keep torch from logging ops that it cannot trace: we raise that, or try another way."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
