"""Prints what each variant takes: ``python -m tests.fused_losses.table [--wide] [NAME ...]``."""

from __future__ import annotations

import argparse
import sys

from remat.formats import bytes_text
from remat.graph_capture.errors import RematError
from tests.fixed_costs import REPLACED, patched
from tests.fused_losses.measure import measured
from tests.fused_losses.variants import LARGE, SMALL, VARIANTS, WIDE


def main() -> None:
    """Measure all variants, or those whose names hold one of the words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--large", action="store_true", help="where logits dominate")
    parser.add_argument("--wide", action="store_true", help="where the head's weight dominates")
    asked = parser.parse_args()
    size = LARGE if asked.large else WIDE if asked.wide else SMALL
    say(f"{'':26s} {'eager: predicted, measured':>34s} {'plan: predicted, measured':>34s} overhead")
    with patched(REPLACED):
        for name, variant in VARIANTS.items():
            if asked.words and not any(word in name for word in asked.words):
                continue
            try:
                found = measured(variant, size)
            except RematError as error:
                say(f"{name:26s} refused: {error}")
                continue
            peaks = (
                found.unmodified_bytes, found.eager_bytes, found.predicted_bytes, found.plan_bytes
            )  # fmt: skip
            a, b, c, d = map(bytes_text, peaks)
            say(
                f"{name:26s} {a:>10s} {b:>10s} {found.misjudged:+10.2%} "
                f"{c:>12s} {d:>10s} {found.beyond:+10.2%} {found.overhead:8.2%} "
                + ("bits" if not found.differences else f"DIFFERS {found.differences}")
            )


def say(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
