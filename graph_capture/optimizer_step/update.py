"""What an optimizer keeps of each parameter, and what its update takes on the device and the host.

An update is bound by memory: it reads a gradient and the state, and writes the state and the
parameter. So its time is bytes over a memory's rate.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from remat.graph_capture.devices.device_table import device_table, modelled_device
from remat.graph_capture.errors import CaptureError
from remat.graph_capture.graph import Optimizer
from remat.graph_capture.optimizer_step.microbatch import Group

StateKind = Literal["float32", "parameter"]
"""``float32``: moments of 4 bytes and, of parameters in fewer, a master copy of 4 bytes, as
mixed-precision training keeps them (K = 12 for Adam: Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054, section 3.1). ``parameter``: moments in the parameter's own type,
as torch's optimizers make them, and no master copy."""

MOMENTS = {"sgd": 0, "momentum": 1, "adamw": 2}
"""Numbers that an optimizer keeps of each parameter."""
FLOAT32_BYTES = 4
HOST_GB_S = 60.0
"""Rate of a host's memory that is not here, in 10^9 bytes a second: about 0.8 of what two channels
of DDR5-4800 have (76.8, JEDEC JESD79-5)."""


class ParameterUpdate(msgspec.Struct, frozen=True):
    """What the update of one parameter takes, where it is run here.

    Attributes
    ----------
    state_bytes : kept between steps. workspace_bytes : taken meanwhile.
    """

    state_bytes: int
    workspace_bytes: int


class Update(msgspec.Struct, frozen=True):
    """An optimizer's update.

    Attributes
    ----------
    optimizer : its name. state : in which type it is kept.
    host_gb_s, device_gb_s : rates of the memories that it goes through, in 10^9 bytes a second.
    """

    optimizer: Optimizer
    state: StateKind
    host_gb_s: float
    device_gb_s: float

    @classmethod
    def on(cls, device: str, optimizer: Optimizer, state: StateKind = "float32",
           host_gb_s: float = HOST_GB_S) -> Update:  # fmt: skip
        """The update by an optimizer that is known by its name, on a device of the table.

        Raises
        ------
        CaptureError : the optimizer is not known, or there is none. DeviceError : the device is
            not in the table.
        """
        if optimizer not in MOMENTS:
            raise CaptureError(
                f"the update of a whole step is that of an optimizer, and {optimizer!r} is none "
                f"that is known: choose one of {', '.join(MOMENTS)}"
            )
        share = device_table().classes["other"].bandwidth
        return cls(optimizer, state, host_gb_s, modelled_device(device).bandwidth_gb_s * share)

    def state_bytes(self, group: Group) -> int:
        """What is kept of a group between steps, beside the parameters themselves."""
        return int(group.trained * self._state_of_one(group.item_bytes))

    def host_us(self, group: Group) -> float:
        """Time of a group's update on the host."""
        return self._touched_bytes(group) / (self.host_gb_s * 1e3)

    def device_us(self, group: Group) -> float:
        """Time of a group's update on the device."""
        return self._touched_bytes(group) / (self.device_gb_s * 1e3)

    def add_us(self, group: Group, *, on_host: bool) -> float:
        """Time in which one gradient is added to another: two are read, one is written."""
        return 3 * group.gradient_bytes / ((self.host_gb_s if on_host else self.device_gb_s) * 1e3)

    def _state_of_one(self, item_bytes: int) -> float:
        moments = MOMENTS[self.optimizer]
        if self.state == "parameter":
            return moments * item_bytes
        master = FLOAT32_BYTES if item_bytes < FLOAT32_BYTES else 0
        return moments * FLOAT32_BYTES + master

    def _touched_bytes(self, group: Group) -> float:
        """The gradient is read, the state read and written, the parameter written.

        Without a master copy in the state, the parameter is read too.
        """
        item_bytes = group.item_bytes
        has_master = self.state == "float32" and item_bytes < FLOAT32_BYTES
        parameter = item_bytes if has_master else 2 * item_bytes
        return group.trained * (item_bytes + parameter + 2 * self._state_of_one(item_bytes))
