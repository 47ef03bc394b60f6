"""What rounding alone moves, and what of it the check of compiled steps forgives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.rewriter.checking.comparison import RoundingNoise, differing_beyond, moved_by_rounding
from tests.limits import AMPLE_S


def test_each_result_moves_by_at_most_a_unit_in_the_last_place() -> None:
    x = torch.randn(1000)
    stream = torch.get_rng_state()
    with RoundingNoise():
        found = x * 1.5
        again = x.bfloat16()
    assert torch.equal(torch.get_rng_state(), stream)
    assert 0 < float((found / (x * 1.5) - 1).abs().max()) <= 2 * torch.finfo(torch.float32).eps
    assert 0 < float((again / x.bfloat16() - 1).abs().max()) <= 2 * torch.finfo(again.dtype).eps


def test_what_is_exact_stays() -> None:
    x, ids = torch.randn(100), torch.arange(100)
    before = x.clone()
    with RoundingNoise():
        whole, view, masked = ids.float() * 2, x[3:], torch.full((3,), 0.1)
        x.mul_(2.0)
    assert torch.equal(whole, ids.float() * 2), "whole numbers are counts and masks"
    assert torch.equal(masked, torch.full((3,), 0.1)), "it is made of no tensor"
    assert torch.equal(x, 2 * before)
    assert view.data_ptr() == x[3:].data_ptr()


def moved(norm: float) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Gradients of which that of a bias is noise of such a norm; others' noise; its size."""
    torch.manual_seed(0)
    noise = [norm * torch.nn.functional.normalize(torch.randn(100), dim=0) for _ in range(2)]
    weight = torch.randn(1000)
    expected = {"gradient of weight": weight, "gradient of bias": noise[0]}
    found = {"gradient of weight": weight, "gradient of bias": noise[1]}
    return expected, found, {"gradient of weight": 0.3, "gradient of bias": norm}


def test_noise_may_be_other_noise_if_it_is_a_small_part_of_all() -> None:
    expected, found, by_rounding = moved(0.01)
    assert differing_beyond(expected, found, 0.01)[0] == ("gradient of bias",)
    assert differing_beyond(expected, found, 0.01, by_rounding)[0] == ()
    found["gradient of bias"] = found["gradient of bias"] * 100
    assert differing_beyond(expected, found, 0.01, by_rounding)[0] == ("gradient of bias",)


def test_what_is_no_noise_may_be_off_by_what_rounding_explains_and_no_further() -> None:
    expected, found, by_rounding = moved(0.01)
    weight = expected["gradient of weight"]
    near, far = weight * 1.05, weight * (torch.rand(1000) > 0.03)
    for value, wrong in ((near, ()), (far, ("gradient of weight",))):
        found["gradient of weight"] = value
        assert differing_beyond(expected, found, 0.01, by_rounding)[0] == wrong
    found["gradient of weight"] = near
    steady = {**by_rounding, "gradient of weight": 1e-4}
    assert differing_beyond(expected, found, 0.01, steady)[0] == ("gradient of weight",)


def test_a_large_part_of_all_may_be_off_by_as_much_as_rounding_moves_it() -> None:
    expected, found, by_rounding = moved(0.01)
    weight = expected["gradient of weight"]
    moved_by = 0.26 * float(weight.norm())  # as of convolutions in bfloat16 before batch norms
    noisy = {**by_rounding, "gradient of weight": moved_by}
    for part, wrong in ((0.2, ()), (0.3, ("gradient of weight",))):
        found["gradient of weight"] = weight * (1 + part)
        assert differing_beyond(expected, found, 0.01, noisy)[0] == wrong


def normed() -> tuple[nn.Module, Tensor]:
    """Biases before batch norms, whose gradients are zero on paper."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.SiLU())]
    return nn.Sequential(*layers), torch.randn(512, 32)


def test_a_bias_before_a_batch_norm_moves_by_its_own_size() -> None:
    model, x = normed()

    def outcome() -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        return {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}  # pyright: ignore

    expected = outcome()
    by_rounding = moved_by_rounding(outcome, expected)
    parts = {name: by_rounding[name] / float(expected[name].norm()) for name in expected}
    assert parts["gradient of 0.bias"] > 0.5
    assert parts["gradient of 0.weight"] < 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:aten.*:UserWarning")
def test_it_trains_by_inductors_code_under_autocast() -> None:
    model, x = normed()
    with torch.autocast("cpu", torch.bfloat16):
        module = remat.rematerialize(
            model, (x,), budget="100%", compile=True, solver="cut", time_limit_s=AMPLE_S
        )
        found = remat.check(model, module, (x,), steps=1)
    assert found.equal
