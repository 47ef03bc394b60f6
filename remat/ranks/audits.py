"""Which steps ranks compare with eager: those with collectives in forward compare the same."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from remat.ranks.together import Together
from remat.rewriter.user_module.module import RematModule


def agree_on_audits(ranks: Together, modules: Iterable[nn.Module]) -> None:
    """Let ranks audit steps in which they meet, if all of them are to; else let none of them.

    Ranks that follow one plan run it equally often, so they need to agree only once.
    """
    audits = [type(m)._remat_audit for m in modules if isinstance(m, RematModule)]
    is_agreed = ranks.all_say("audit", all(audit is not None for audit in audits))
    for audit in filter(None, audits):
        audit.is_agreed = is_agreed
