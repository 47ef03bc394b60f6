"""What is asked of a plan of a whole optimizer step, refused before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

import msgspec

from remat.budgets import parse_budget
from remat.graph_capture.devices.device_table import CPU, device_table, is_in_table
from remat.graph_capture.devices.lower_tiers import lower_tiers
from remat.graph_capture.errors import BudgetError, CaptureError, DeviceError, option
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.links import Link, Links
from remat.graph_capture.optimizer_step.update import MOMENTS, StateKind

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer as TorchOptimizer


@dataclass(frozen=True)
class StepRequest:
    """What is asked of a plan of a whole step.

    Attributes
    ----------
    device : of the table. microbatches : batches in one optimizer step.
    optimizer, state : whose update it is, and in which type its state is kept.
    budget : of the device, in bytes or ``auto``. host, nvme : as of `remat.capture`.
    nvme_gb_s : sustained rate of NVMe each way, in 10^9 bytes a second; None for that of the drive
        in the table.
    is_run : whether the step is to be run here too, rather than planned alone.
    """

    device: str
    microbatches: int
    optimizer: Optimizer
    budget: str | SupportsIndex = "auto"
    host: str | SupportsIndex | None = None
    nvme: str | None = None
    state: StateKind = "float32"
    nvme_gb_s: float | None = None
    is_run: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise BudgetError(
                f"microbatches {self.microbatches} leave nothing to train on: give 1 or more"
            )
        if not is_in_table(self.device) and not (self.is_run and self.device == CPU):
            raise DeviceError(
                "a whole step over the host is run on a CPU, by remat.training_step in Python, and "
                f"planned for devices of the table ({', '.join(device_table().devices)}), not for "
                f"{self.device}: name one, or train here with remat.rematerialize(model, ..., "
                "host=...), which moves activations"
            )
        if self.host is None:
            raise BudgetError(
                "a whole step is planned over the device and its host: give "
                f"{option('host', '120GiB')} too, or leave out {option('microbatches')}"
            )
        if self.optimizer not in MOMENTS:
            raise CaptureError(
                f"optimizer {self.optimizer!r} has no update to plan: name one, "
                f"{', '.join(MOMENTS)}"
            )
        if parse_budget(self.budget).is_of_the_step:
            raise BudgetError(
                f"budget {self.budget!r} is of a step without microbatches: give bytes, such as "
                "22GiB, or auto"
            )
        if self.nvme_gb_s is not None and (self.nvme is None or self.nvme_gb_s <= 0):
            raise BudgetError(
                f"a rate of {self.nvme_gb_s:g} GB/s is that of NVMe: give "
                f"{option('nvme', '/mnt/nvme:200GiB')} too, and a rate above 0"
            )
        lower_tiers(self.host, self.nvme, self.device)

    def links(self, links: Links) -> Links:
        """The links of the device, with the rate that is asked for."""
        if self.nvme_gb_s is None or links.write is None or links.read is None:
            return links
        rate = self.nvme_gb_s * 1e3
        return msgspec.structs.replace(
            links,
            write=Link(rate, links.write.latency_us),
            read=Link(rate, links.read.latency_us),
            source=f"{links.source.partition(';')[0]}; NVMe {self.nvme_gb_s:g} GB/s as asked for",
        )


def step_request(
    model: nn.Module, optimizer: TorchOptimizer, *, budget: str | SupportsIndex,
    microbatches: int | None, device: str | None, host: str | SupportsIndex | None,
    nvme: str | None,
) -> StepRequest:  # fmt: skip
    """What a call in Python asks for: the update and the state of an optimizer of torch's.

    Raises
    ------
    CaptureError : the optimizer is none that is known. BudgetError, DeviceError : an argument is
        missing or cannot be read; the message says what can be done instead.
    """
    from remat.graph_capture.devices.placement import resolved_device
    from remat.graph_capture.gradients.optimizers import require_known

    require_known(optimizer)
    if microbatches is None:
        raise BudgetError(
            "training_step takes host, nvme and device to plan a whole step of several batches: "
            "give microbatches=8 too. To move activations of one batch to the host and train, use "
            "remat.rematerialize(model, ..., host=...)"
        )
    moments = "adamw" if "betas" in optimizer.defaults else "sgd"
    if optimizer.defaults.get("momentum"):
        moments = "momentum"
    where = resolved_device(device, model)
    return StepRequest(
        where, microbatches, moments, budget, host, nvme, "parameter", is_run=where == CPU
    )
