"""What audits cost: `python -m benchmarks.runtime` prints it with the rest.

At some steps the model's own forward runs beside the planned one. What that takes is timed in the
audited ones of 64 steps, and told as a part of all steps: audits come at the powers of two and at
every thousandth step.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch import Tensor, nn

import remat
from benchmarks.running.guards import deep_gpt
from examples.gpt import Sizes
from remat.rewriter.checking.audit import Audit, is_audited
from remat.rewriter.user_module.module import RematModule

GPT_SIZES = Sizes(layers=6, width=128, heads=4, seq=128, batch=8, vocab=512, dropout=0.1)
STEPS, THOUSAND = 64, 1000


def audits_row(sizes: Sizes = GPT_SIZES, steps: int = STEPS, budget: str = "70%") -> dict[str, Any]:
    """Microseconds of an audit and of a step, and audits as a part of a thousand steps."""
    model, args = deep_gpt(sizes)
    fast = remat.rematerialize(model, args, budget=budget, solver="chen_sqrt", check=False)
    assert isinstance(fast, RematModule)
    audit = type(fast).audit
    assert audit is not None
    timed = _Timed(audit)
    steps_us = [_step_us(model, fast, args) for _ in range(steps)]
    assert audit.audited == len(timed.audits_us), audit.why_not
    plain = [us for n, us in enumerate(steps_us, 1) if not is_audited(n)]
    step_us, audit_us = statistics.median(plain), statistics.median(timed.audits_us)
    first = sum(is_audited(n) for n in range(1, THOUSAND + 1))
    return {
        "model": f"GPT, {sizes.layers} layers",
        "audit_us": audit_us,
        "step_us": step_us,
        "of_first_thousand": first * audit_us / (THOUSAND * step_us),
        "of_later_ones": audit_us / (THOUSAND * step_us),
    }


class _Timed:
    """Adds up what an audit takes before and after the planned forward of each audited step."""

    def __init__(self, audit: Audit) -> None:
        self.audits_us: list[float] = []
        begin, differing = audit.begin, audit.differing

        def timed_begin(module: nn.Module, leaves: list[Any]) -> Any:
            start = time.perf_counter()
            seen = begin(module, leaves)
            if seen is not None:
                self.audits_us.append(1e6 * (time.perf_counter() - start))
            return seen

        def timed_differing(*given: Any) -> Any:
            start = time.perf_counter()
            names = differing(*given)
            self.audits_us[-1] += 1e6 * (time.perf_counter() - start)
            return names

        vars(audit).update(begin=timed_begin, differing=timed_differing)


def _step_us(model: nn.Module, module: nn.Module, args: tuple[Tensor, ...]) -> float:
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    module(*args).backward()
    return 1e6 * (time.perf_counter() - start)


def audits_text(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"audits of {row['model']}: {row['audit_us'] / row['step_us']:.2f} of a step of "
        f"{row['step_us']:.0f} us each, {100 * row['of_first_thousand']:.2f} % of the first "
        f"thousand steps, {100 * row['of_later_ones']:.3f} % of later ones"
    )
