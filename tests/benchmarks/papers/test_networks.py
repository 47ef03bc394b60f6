"""The models of published tables have the sizes that were published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.papers import networks
from benchmarks.papers.published import JOBS, MB

COUNTS: dict[str, tuple[Callable[[], dict[str, Any]], int]] = {
    # He et al. 2015, table 6: 0.46 M. DTR's data: 2.321408 MB of parameters, buffers and the batch.
    "resnet-32": (lambda: networks.cifar_resnet(1), 464_154),
    # Huang et al. 2017, table 2: 0.8 M.
    "densenet-bc": (lambda: networks.densenet(1), 769_162),
    # DTR's data: 70.0 MB of parameters and buffers, in blocks of its allocator.
    "unet": (lambda: networks.bilinear_unet(1, 32), 17_262_977),
    # Simonyan and Zisserman 2014, table 2: 144 M.
    "vgg-19": (lambda: networks.vgg_19(1), 143_667_240),
    "qwen3 14B": (lambda: networks.qwen3(1, 8), 14_768_307_200),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_number_of_parameters(name: str) -> None:
    make, count = COUNTS[name]
    assert sum(one.numel() for one in make()["model"].parameters()) == count


@pytest.mark.parametrize(
    "make",
    [
        lambda: networks.cifar_resnet(2, 8), lambda: networks.densenet(2, 10),
        lambda: networks.bilinear_unet(1, 32), lambda: networks.vgg_19(1, 32),
        lambda: networks.qwen3(
            1, 8, layers=1, width=16, heads=4, kv_heads=2, hidden=32, vocab=32
        ),
    ],
)  # fmt: skip
def test_a_step_runs(make: Callable[[], dict[str, Any]]) -> None:
    made = make()
    model = made["model"].to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        torch.nn.init.ones_(tensor)
    loss = made["loss_fn"](model(*made["args"]), made["target"])
    loss.backward()
    assert loss.dim() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dtrs_budgets_are_shares_and_its_figures_overheads() -> None:
    figures = [one for job in JOBS if job.table == "dtr" for one in job.figures]
    assert all(0 < one.budget_share < 1 and one.overhead > 0 for one in figures)
    assert all(one.budget_bytes or one.budget_share for job in JOBS for one in job.figures)
    assert MB == 10**6
