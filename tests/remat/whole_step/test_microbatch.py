"""Bytes and times of an optimizer's update, by hand."""

from __future__ import annotations

import pytest

from remat.graph_capture.devices.known_devices import modelled_device, shares_of
from remat.graph_capture.errors import CaptureError
from remat.whole_step.microbatch import HOST_GB_S, StateKind, Update, UpdateGroup

HALF = UpdateGroup("half", trained=1_000_000, parameter_bytes=2_000_000, gradient_bytes=2_000_000,
             item_bytes=2)  # fmt: skip
FULL = UpdateGroup("full", trained=1_000_000, parameter_bytes=4_000_000, gradient_bytes=4_000_000,
             item_bytes=4)  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "state", "group", "state_bytes", "touched_bytes"),
    [
        # Two moments and a master copy, each read and written; gradient read, parameter written.
        ("adamw", "float32", HALF, 12, 2 + 2 + 24),
        # No master copy: the parameter is read and written.
        ("adamw", "float32", FULL, 8, 4 + 8 + 16),
        ("adamw", "parameter", HALF, 4, 2 + 4 + 8),
        ("momentum", "float32", HALF, 8, 2 + 2 + 16),
        ("momentum", "parameter", FULL, 4, 4 + 8 + 8),
        ("sgd", "parameter", HALF, 0, 2 + 4),
    ],
)
def test_bytes_of_a_number(
    optimizer: str, state: StateKind, group: UpdateGroup, state_bytes: int, touched_bytes: int
) -> None:
    update = Update(optimizer, state, host_gb_s=10.0, device_gb_s=1000.0)  # type: ignore[arg-type]
    assert update.state_bytes(group) == state_bytes * 1_000_000
    assert update.host_us(group) == pytest.approx(touched_bytes * 100)
    assert update.device_us(group) == pytest.approx(touched_bytes)
    size_bytes = group.gradient_bytes
    assert update.add_us(size_bytes, on_host=True) == pytest.approx(3 * size_bytes / 1e4)


def test_a_device_of_the_table_has_its_memory_rate() -> None:
    update = Update.on("rtx4090", "adamw")
    share = shares_of(modelled_device("rtx4090"))["other"].bandwidth
    assert update.device_gb_s == pytest.approx(share * 1008)
    assert update.host_gb_s == HOST_GB_S


def test_an_optimizer_without_an_update_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"choose one of sgd, .*'none' is unknown"):
        Update.on("rtx4090", "none")
