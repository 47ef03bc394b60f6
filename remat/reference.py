"""How the unmodified step runs that a plan is compared with: within the plan's budget too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.budgets import saved_elsewhere, unmodified
from remat.formats import bytes_text
from remat.graph_capture.devices.known_devices import is_cuda
from remat.graph_capture.devices.memory import free_bytes
from remat.graph_capture.graph import TrainingGraph
from remat.graph_capture.spill_files import free_on_drive_bytes, host_folder

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Reference:
    """The unmodified step beside a plan.

    What it holds is moved as far as it has to be: its results and copies of the state, and what it
    saves for backward. On a CPU these go to files, from a CUDA device to the host's memory.

    Attributes
    ----------
    graph : that the plan was solved on. budget_bytes : of the plan.
    beside_bytes : gradients of earlier batches, beside which a check makes its own.
    """

    graph: TrainingGraph
    budget_bytes: int
    beside_bytes: int = 0

    @property
    def keeps_results(self) -> bool:
        """Whether results, and copies of the state, stay on the device while a step runs."""
        peak_bytes = unmodified(self.graph).peak_bytes + self._results_bytes + self.beside_bytes
        return peak_bytes <= self.budget_bytes

    @property
    def keeps_saved(self) -> bool:
        """Whether what eager saves for backward stays on the device."""
        return unmodified(self.graph).peak_bytes <= self.budget_bytes

    @property
    def room_bytes(self) -> float | None:
        """The most that may be on the device at once of what eager saves; None if it all stays."""
        if self.keeps_saved:
            return None
        fits = saved_elsewhere(self.graph)[0] <= self.budget_bytes
        return self.budget_bytes - self.graph.resident.total_bytes if fits else math.inf

    def why_not(self) -> str:
        """Why it cannot run within the budget; empty where it can."""
        if self.keeps_results:
            return ""
        if self.beside_bytes:
            return "which makes gradients beside those of earlier batches, more than the budget"
        need_bytes, moved_bytes = saved_elsewhere(self.graph)
        if self.keeps_saved:
            moved_bytes = 0
        elif need_bytes > self.budget_bytes:
            return (
                f"which needs {bytes_text(need_bytes)} even while what it saves for backward is "
                f"kept {self._where}, and the budget is {bytes_text(self.budget_bytes)}"
            )
        moved_bytes += 2 * self._results_bytes
        if moved_bytes > self._free_bytes:
            return f"of which {bytes_text(moved_bytes)} would have to be kept {self._where}"
        return ""

    @property
    def _results_bytes(self) -> int:
        """What is copied before the steps, and what eager's leaves for the comparison."""
        graph, resident = self.graph, self.graph.resident
        before_bytes = resident.batch_bytes + resident.buffers_bytes
        if is_cuda(graph.device):  # results are on the host in any case
            return before_bytes
        left = {*graph.outputs, *graph.forward_outputs}
        made = sum(value.size_bytes for value in graph.values if value.name in left)
        return before_bytes + resident.buffers_bytes + made

    @property
    def _where(self) -> str:
        return "in the host's memory" if is_cuda(self.graph.device) else f"in {host_folder()}"

    @property
    def _free_bytes(self) -> int:
        if is_cuda(self.graph.device):
            return free_bytes()
        return free_on_drive_bytes(host_folder())


def gradients_there(model: nn.Module) -> int:
    """Bytes of the gradients that the model's parameters have now."""
    from remat.graph_capture.tracing.resident import storage_bytes

    return storage_bytes(p.grad for p in model.parameters())
