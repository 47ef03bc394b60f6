"""Ranks that rewrite a model with collectives by themselves: their plans must run these alike.

Inside `remat.rematerialize` ranks have one plan. By `remat.rewrite` and `remat.load` each follows
what it is given, so they compare the orders of their collectives before a step can wait for ever.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from remat.graph_capture.over_ranks.collectives import collectives_in, groups_of
from remat.graph_capture.over_ranks.fake_group import is_fake
from remat.ranks.required_group import resolved
from remat.ranks.together import Together
from remat.rewriter.plans import loading
from remat.rewriter.rewriting import rewrite as rewrite_alone
from remat.rewriter.user_module.module import RematModule

Given = ParamSpec("Given")
Made = TypeVar("Made")


def require_same_order(module: RematModule, what: str) -> None:
    """Refuse a module whose collectives are run in another order, or as often, on other ranks.

    Each rank of the collectives' groups must call, in the same order as the others.

    Parameters
    ----------
    what : the function that made it, as the user knows it.

    Raises
    ------
    AgreementError : their orders differ, or a rank does not come within the group's timeout.
    """
    run = [*collectives_in(module.forward_module), *collectives_in(module.backward_module)]
    order = hashlib.sha256(" ".join(f"{node.name}" for node in run).encode()).hexdigest()
    for group in dict.fromkeys(map(resolved, groups_of(run))):
        if group.size() > 1 and not is_fake(group):
            with Together(group, what) as ranks:
                ranks.require_same_order(order)


def _agreed(make: Callable[Given, Made], what: str) -> Callable[Given, Made]:
    @functools.wraps(make)
    def compared(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        made = make(*args, **kwargs)
        module: Any = made
        if isinstance(module, RematModule):
            require_same_order(module, what)
        return made

    return compared


rewrite = _agreed(rewrite_alone, "remat.rewrite")
load = _agreed(loading.load, "remat.load")
