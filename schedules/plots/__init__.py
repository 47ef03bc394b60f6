"""Pictures with matplotlib, of the extra ``plot``: each function draws on an ``ax`` of the user's.

matplotlib is not imported before something is drawn. Colours are those of
`remat.schedules.views.palette`.
"""

from __future__ import annotations

from remat.schedules.plots.curves import draw_convergence, draw_front, draw_predicted_measured
from remat.schedules.plots.memory_plots import (
    draw_layout,
    draw_live_bytes,
    draw_peak_values,
    draw_ribbon,
)

__all__ = [
    "draw_convergence",
    "draw_front",
    "draw_layout",
    "draw_live_bytes",
    "draw_peak_values",
    "draw_predicted_measured",
    "draw_ribbon",
]
