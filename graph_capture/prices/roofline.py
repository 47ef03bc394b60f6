"""A model of the time of an op, from its work and a device's rates.

An op takes the longer of its arithmetic and its traffic, and a launch:
``max(flops / rate, bytes / bandwidth) + launch`` (S. Williams, A. Waterman, D. Patterson,
"Roofline", 2009, https://doi.org/10.1145/1498765.1498785). Rate and bandwidth are shares of the
device's peaks. `devices.json` assumes a share for each class of ops. A profile of the device gives
measured ones: the median over ops of the same target, else of the same class.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from remat.graph_capture.devices.device_table import Device, Efficiency, device_table
from remat.graph_capture.prices.op_work import Work
from remat.graph_capture.prices.profile import Profile, ProfiledOp

LAUNCH_PART = 0.1
"""An op whose work is a smaller part of a launch shows how long a launch is."""
LEAST_WORK = 0.5
"""In launches. An op of less work says too little of the rates to be part of a fit."""


@dataclass(frozen=True)
class Roofline:
    """The model of one device.

    Attributes
    ----------
    device : its peaks. launch_us : least time of any op.
    shares : of the peaks, by target and by class of ops. A class serves targets without own shares.
    """

    device: Device
    shares: dict[str, Efficiency]
    launch_us: float

    @classmethod
    def assumed(cls, device: Device) -> Roofline:
        """With the shares of the table."""
        table = device_table()
        return cls(device, dict(table.classes), table.launch_us)

    def cost_us(self, target: str, work: Work) -> float:
        """Time of one run of an op with that work."""
        share = self.shares.get(target) or self.shares[work.kind]
        return self.launch_us + self._work_us(work, share)

    def fitted(self, profile: Profile) -> Roofline:
        """With the shares and the launch that the ops of `profile` show."""
        return _Fit(self, profile).roofline()

    def errors(self, profile: Profile) -> list[float]:
        """How far the model fitted to `profile` is off on each of its ops, ascending.

        Each error is a part of the measured time. Each op is left out of its own fit: a target
        that was measured once would otherwise be modelled without error.
        """
        return _Fit(self, profile).errors()

    def _work_us(self, work: Work, share: Efficiency) -> float:
        arithmetic_us, traffic_us = self._peak_us(work)
        return max(arithmetic_us / share.rate, traffic_us / share.bandwidth)

    def _peak_us(self, work: Work) -> tuple[float, float]:
        """Time of the arithmetic and of the traffic at the device's peaks."""
        flops_per_us = self.device.flops_per_us(self._rate(work))
        return work.flops / flops_per_us, work.moved_bytes / self.device.bytes_per_us

    def _rate(self, work: Work) -> str:
        """The dtype whose peak counts: TF32 where torch lets tensor cores round float32."""
        if work.dtype != "float32" or "tf32" not in self.device.tflops:
            return work.dtype
        is_rounded = work.kind == "convolution" and torch.backends.cudnn.allow_tf32
        is_rounded |= work.kind == "matmul" and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if is_rounded else work.dtype


@dataclass
class _Fit:
    """How the ops of a profile compare with what is assumed of their classes.

    Attributes
    ----------
    factors : by target and by class: for each op of enough work, its time over the assumed
        time, both without a launch.
    """

    assumed: Roofline
    profile: Profile
    launch_us: float = field(init=False)
    factors: dict[str, dict[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        assumed, self.factors = self.assumed, defaultdict(dict)
        tiny_us = LAUNCH_PART * assumed.launch_us
        launches = [one.cost_us for _, one, work_us in self._seen() if work_us < tiny_us]
        least_us = min((one.cost_us for _, one, _ in self._seen()), default=assumed.launch_us)
        # Without an op of hardly any work, a launch is no longer than the quickest op.
        self.launch_us = statistics.median(launches or [min(assumed.launch_us, least_us)])
        for key, one, work_us in self._seen():
            if work_us and one.cost_us - self.launch_us >= LEAST_WORK * self.launch_us:
                for group in _groups(key, one):
                    self.factors[group][key] = (one.cost_us - self.launch_us) / work_us

    def _seen(self) -> Iterator[tuple[str, ProfiledOp, float]]:
        """Each measured op, with the time that its work is assumed to take."""
        for key, one in self.profile.ops.items():
            if one.cost_us > 0 and not one.is_estimate:
                share = self.assumed.shares[one.work.kind]
                yield key, one, self.assumed._work_us(one.work, share)

    def roofline(self) -> Roofline:
        shares = dict(self.assumed.shares)
        for group, found in self.factors.items():
            kind = self.profile.ops[next(iter(found))].work.kind
            factor, share = statistics.median(found.values()), self.assumed.shares[kind]
            shares[group] = Efficiency(share.rate / factor, share.bandwidth / factor)
        return Roofline(self.assumed.device, shares, self.launch_us)

    def errors(self) -> list[float]:
        return sorted(
            abs((self.launch_us + self._factor(key, one) * work_us) / one.cost_us - 1)
            for key, one, work_us in self._seen()
        )

    def _factor(self, key: str, one: ProfiledOp) -> float:
        """The median factor of the other ops of its target, else of its class; 1 without any."""
        for group in _groups(key, one):
            found = self.factors.get(group, {})
            others = [factor for other, factor in found.items() if other != key]
            if others:
                return statistics.median(others)
        return 1.0


def _groups(key: str, one: ProfiledOp) -> Iterable[str]:
    return key.partition("(")[0], one.work.kind
