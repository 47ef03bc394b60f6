"""Pictures with matplotlib, of the extra ``plot``: one function a file, each draws on an ``ax``.

The user arranges and prints the ``ax``. matplotlib is not imported before something is drawn.
Colours are those of `remat.schedules.views.palette`.
"""

from __future__ import annotations

from remat.schedules.plots.convergence import draw_convergence
from remat.schedules.plots.front import draw_front
from remat.schedules.plots.layout import draw_layout
from remat.schedules.plots.live_bytes import draw_live_bytes
from remat.schedules.plots.peak_values import draw_peak_values
from remat.schedules.plots.predicted_measured import draw_predicted_measured
from remat.schedules.plots.ribbon import draw_ribbon

__all__ = [
    "draw_convergence",
    "draw_front",
    "draw_layout",
    "draw_live_bytes",
    "draw_peak_values",
    "draw_predicted_measured",
    "draw_ribbon",
]
