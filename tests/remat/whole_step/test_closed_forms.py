"""Formulas of the papers against the simulator."""

from __future__ import annotations

import pytest

from remat.graph_capture.graph import Link, Links, Resident
from remat.whole_step.microbatch import Layer, LayerOption, Microbatch, Update, UpdateGroup
from remat.whole_step.planned_step import PlannedStep, StepTask, planned_step
from remat.whole_step.step_config import Pass, StepConfig

TOKENS, PARAMETERS, LAYERS = 4096, 218_112_000, 64
FLOPS_PER_US = 100e6
"""100 TFLOP/s reached."""


def transformer(layers: int = LAYERS) -> Microbatch:
    """Layers of 2 flops a parameter and token forward, 4 backward, and 2 for full recompute."""
    forward_us = 2 * PARAMETERS * TOKENS / FLOPS_PER_US
    found = []
    for at in range(layers):
        turns = at == layers - 1
        reads = () if at == 0 else (f"x{at}",)
        back_makes = () if at == 0 else (f"d{at}",)
        makes, back_reads = ((), ()) if turns else ((f"x{at + 1}",), (f"d{at + 1}",))
        option = LayerOption(0, forward_us, 0, 2 * PARAMETERS)
        found.append(
            Layer(
                f"layers.{at}", (at,), (at,), forward_us, 2 * forward_us, reads, makes, back_reads,
                back_makes, (option,), turns,
            )
        )  # fmt: skip
    sizes = {f"{kind}{at}": 2 * TOKENS * 4096 for at in range(1, layers) for kind in "xd"}
    group = UpdateGroup("layers", PARAMETERS, 2 * PARAMETERS, 2 * PARAMETERS, item_bytes=2)
    return Microbatch(
        "Transformer", tuple(found), (group,) * layers, sizes, (), Resident(), "rtx4090", (),
        "modelled", draws=False,
    )  # fmt: skip


def task_at(gb_s: float, nvme_gb_s: float = 0.0, host_gb_s: float = 1e9) -> StepTask:
    """A machine with as much room as is needed, and an update that takes no time on the host."""
    link, drive = Link(gb_s * 1e3), Link(nvme_gb_s * 1e3) if nvme_gb_s else None
    links = Links(link, link, 1 << 50, drive, drive, 1 << 50 if drive else 0)
    return StepTask(transformer(), Update("adamw", "float32", host_gb_s, 800.0), links, 1 << 50)


def streamed(task: StepTask, state: str, *, prefetch: bool, slots: int = 3) -> PlannedStep:
    config = StepConfig(
        (Pass(1, (0,) * LAYERS),), (state,) * LAYERS, keeping="stream", prefetch=prefetch,  # type: ignore[arg-type]
        slots=slots,
    )  # fmt: skip
    found = planned_step(task, config, "test")
    assert isinstance(found, PlannedStep)
    return found


@pytest.mark.parametrize("gb_s", [6.4, 12.8, 25.6, 51.2])
def test_efficiency_without_overlap_is_that_of_zero_infinity(gb_s: float) -> None:
    """Efficiency = ait · bw / (ait · bw + peak), with the arithmetic intensity of what waits.

    Rajbhandari et al. 2021 (https://arxiv.org/abs/2104.07857), section 4. Parameters of two bytes
    are loaded twice for 8 flops a parameter and token, so ait = 2 · seq · bsz; gradients go down
    beside the computations. The last layer is loaded once, since both its phases are one op.
    """
    simulation = streamed(task_at(gb_s), "host", prefetch=False).simulation
    bytes_per_us = gb_s * 1e3
    loads_us = (2 * LAYERS - 1) * 2 * PARAMETERS / bytes_per_us
    last_gradient_us = 2 * PARAMETERS / bytes_per_us
    compute_us = simulation.busy_us["device"]
    assert compute_us == pytest.approx(8 * PARAMETERS * LAYERS * TOKENS / FLOPS_PER_US)
    assert simulation.time_us == pytest.approx(compute_us + loads_us + last_gradient_us, rel=1e-6)
    intensity = 2 * TOKENS
    formula = intensity * bytes_per_us / (intensity * bytes_per_us + FLOPS_PER_US)
    assert compute_us / simulation.time_us == pytest.approx(formula, rel=1e-6)


def test_with_prefetch_only_the_first_load_and_the_last_gradient_wait() -> None:
    """At 25.6 GB/s a layer's load, 17 ms, hides behind its forward, 18 ms."""
    simulation = streamed(task_at(25.6), "host", prefetch=True).simulation
    once_us = 2 * PARAMETERS / 25.6e3
    assert simulation.time_us == pytest.approx(simulation.busy_us["device"] + 2 * once_us, rel=1e-6)


def test_state_on_nvme_takes_its_bytes_over_the_rate() -> None:
    """Reads and writes of 12 bytes a parameter go side by side, one state apart."""
    simulation = streamed(task_at(25.6, nvme_gb_s=2.0), "nvme", prefetch=True).simulation
    all_us = 12 * PARAMETERS * LAYERS / 2e3
    one_us = all_us / LAYERS
    assert all_us <= simulation.time_us <= all_us + 2 * one_us + simulation.busy_us["device"]
