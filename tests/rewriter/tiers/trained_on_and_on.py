"""Run as a script: trains with copies, until it is killed or, with ``once``, for half a step."""

from __future__ import annotations

import sys

from tests.fixed_costs import REPLACED, patched
from tests.rewriter.tiers.plans import copied


def main(how: str) -> None:
    with patched(REPLACED):
        plan = copied()
    module = plan.module()
    module(*plan.args).backward()
    print("going", flush=True)
    loss = module(*plan.args)
    while how == "forever":
        loss.backward()
        loss = module(*plan.args)


if __name__ == "__main__":
    main(sys.argv[1])
