"""The colours of pictures, one a role: M. Okabe and K. Ito, "Color Universal Design" (2008)."""

from __future__ import annotations

GREY, DARK_GREY, ORANGE = "#999999", "#666666", "#E69F00"
SKY, GREEN, YELLOW = "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"

ROLES: dict[str, str] = {
    "plan": BLUE, "unmodified": GREY, "measured": PURPLE, "budget": VERMILLION, "bound": GREEN,
    "forward": BLUE, "backward": SKY, "recompute": ORANGE, "kept": GREEN,
}  # fmt: skip

KINDS: dict[str, str] = {
    "resident": GREY, "activation": BLUE, "gradient": GREEN, "tangent": YELLOW, "output": SKY,
    "rng_state": PURPLE, "buffer": DARK_GREY, "workspace": ORANGE,
}  # fmt: skip

CYCLE = (BLUE, ORANGE, PURPLE, SKY, YELLOW, GREEN, VERMILLION)  # solvers, modules: without a role


def cycled(names: list[str], without: tuple[str, ...] = ()) -> dict[str, str]:
    """A colour for each name, in order; `GREY` once the cycle is used up."""
    cycle = [colour for colour in CYCLE if colour not in without]
    return {name: cycle[i] if i < len(cycle) else GREY for i, name in enumerate(names)}
